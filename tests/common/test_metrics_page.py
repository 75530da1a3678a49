"""Series of a metrics page: as the client library reads them, and not more than an engine has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from quire_common.metrics_page import MAX_PAGE_BYTES, MAX_SERIES, points

names = st.sampled_from(["vllm:num_requests_running", "quire_steps_total", "quire_steps", "go_info", "x"])
texts = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\x85\u2028\u2029"), max_size=8)
label_names = st.from_regex("[a-z][a-z0-9_]{0,5}", fullmatch=True)
numbers = st.floats(allow_nan=False) | st.integers(-5, 10**12).map(float)


@given(st.lists(st.tuples(names, st.dictionaries(label_names, texts, max_size=3), numbers, st.booleans()), max_size=6))
def test_pages_are_read_as_the_client_library_reads_them(series):
    def line(name, labels, value, stamped):
        escaped = {k: v.replace("\\", r"\\").replace('"', r"\"") for k, v in labels.items()}
        inside = ",".join(f'{k}="{v}"' for k, v in escaped.items())
        return f"{name}{{{inside}}} {value!r}{' 1700000000000' if stamped else ''}" if inside else f"{name} {value!r}"

    page = "".join(f"{line(*one)}\n" for one in series)
    wanted = {"vllm:num_requests_running", "quire_steps_total"}
    theirs = [s for family in text_string_to_metric_families(page) for s in family.samples if s.name in wanted]
    found = points(page, wanted)
    assert sorted((p.name, sorted(p.labels.items()), p.value) for p in found) == sorted(
        (s.name, sorted(s.labels.items()), s.value) for s in theirs
    )


NAME, CONFIG = "vllm:num_requests_running", "vllm:cache_config_info"
FILL = MAX_PAGE_BYTES


@pytest.mark.parametrize(
    ("page", "count"),
    [
        (f"{NAME} 1\n" * MAX_SERIES, MAX_SERIES),
        (f"{NAME} 1\n" * (MAX_SERIES + 1), 0),
        (f"{NAME} {'9' * 64}\n", 1),
        (f"{NAME} {'9' * FILL}\n", 0),
        (f"{CONFIG}{{{'a' * FILL}}} 1\n", 0),
        (f'{CONFIG}{{a="{"x" * 4000}"}} 1\n', 1),
        (f'{CONFIG}{{a="{"x" * FILL}"}} 1\n', 0),
        (f"{NAME}{{{'} ' * (FILL // 2)}\n", 0),
        (f"{NAME}{' ' * FILL}\n", 0),
        (f"{NAME}\n" * (FILL // 30), 0),
    ],
)
def test_page_that_is_no_engines_is_refused(page: str, count: int) -> None:
    assert len(points(page, (NAME, CONFIG))) == count
