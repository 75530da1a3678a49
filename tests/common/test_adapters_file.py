"""The file that lists an engine's adapters, and the engine's report about them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.adapters_file import (
    AdapterEntry,
    AdapterFailure,
    AdapterReport,
    AdaptersReport,
    AdapterState,
    Placement,
    Slots,
    name_problem,
    parse_adapters,
    parse_report,
    render_adapters,
    render_report,
)

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._:/@-]{0,20}[A-Za-z0-9])?", fullmatch=True)
ENTRIES = st.builds(
    AdapterEntry,
    name=NAMES,
    source=st.text(min_size=1),
    revision=st.none() | st.text(),
    generation=st.integers(min_value=0),
    placement=st.sampled_from(Placement),
)


@given(st.lists(ENTRIES, unique_by=lambda entry: entry.name))
def test_written_file_is_read_back(entries: list[AdapterEntry]) -> None:
    found, problems = parse_adapters(render_adapters(entries))
    assert problems == []
    assert found == sorted(entries, key=lambda entry: entry.name)


def test_defaults_are_filled_in() -> None:
    found, problems = parse_adapters('{"adapters": [{"name": "a", "source": "file:///a"}]}')
    assert problems == []
    assert found == [
        AdapterEntry(name="a", source="file:///a", revision=None, generation=0, placement=Placement.ALL),
    ]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"name": ""}, "adapters[1].name"),
        ({"name": "-a"}, "adapters[1].name"),
        ({"name": "a b"}, "adapters[1].name"),
        ({"name": 7}, "adapters[1].name"),
        ({"name": "good"}, "adapters[1].name"),
        ({"source": ""}, "adapters[1].source"),
        ({"source": None}, "adapters[1].source"),
        ({"revision": 7}, "adapters[1].revision"),
        ({"generation": -1}, "adapters[1].generation"),
        ({"generation": True}, "adapters[1].generation"),
        ({"generation": "3"}, "adapters[1].generation"),
        ({"placement": "Some"}, "adapters[1].placement"),
        ({"placement": []}, "adapters[1].placement"),
        ({"weight": 1}, "adapters[1].weight"),
    ],
)
def test_wrong_entry_is_named_and_the_others_stay(fields: dict[str, Any], path: str) -> None:
    good = {"name": "good", "source": "file:///good"}
    found, problems = parse_adapters(json.dumps({"adapters": [good, {"name": "b", "source": "s", **fields}]}))
    assert [entry.name for entry in found] == ["good"]
    assert [problem.partition(":")[0] for problem in problems] == [path]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"adapters": {}}', "null"])
def test_file_of_another_form_has_one_problem(text: str) -> None:
    found, problems = parse_adapters(text)
    assert found == [] and len(problems) == 1


@pytest.mark.parametrize(("name", "is_good"), [("fr-legal", True), ("org/name:v1", True), ("a/", False), (None, False)])
def test_names_of_adapters(name: object, is_good: bool) -> None:
    assert (name_problem(name) is None) is is_good


def test_report_is_read_back() -> None:
    report = AdaptersReport(
        adapters=[
            AdapterReport(name="a", generation=3, state=AdapterState.LOADED, revision="1", rank=8, bytes=4096),
            AdapterReport(
                name="b",
                generation=1,
                state=AdapterState.FAILED,
                reason=AdapterFailure.RANK_TOO_HIGH,
                message="r: 64 is more than 16",
            ),
        ],
        slots=Slots(total=4, used=1),
        loads_total=7,
    )
    sent = json.loads(json.dumps(render_report(report)))
    assert parse_report(sent) == report
    sent["adapters"][0]["speed"] = 1
    assert parse_report(sent) == report


SLOTS = {"total": 1, "used": 1}


def sent(**adapter: object) -> dict[str, object]:
    known = {"name": "a", "generation": 1, "state": "Ready"}
    return {"adapters": [known | adapter], "slots": SLOTS, "loads_total": 0}


@pytest.mark.parametrize(
    "content",
    [
        *(None, [], {}, {"adapters": [], "slots": {}, "loads_total": 0}),
        {"adapters": ["a"], "slots": SLOTS, "loads_total": 0},
        {"adapters": [], "slots": SLOTS, "loads_total": float("inf")},
        *(sent(revision={}), sent(message=1), sent(rank="8"), sent(bytes=[])),
    ],
    ids=repr,
)
def test_invalid_content_is_not_a_report(content: object) -> None:
    assert parse_report(sent()) is not None
    assert parse_report(content) is None
