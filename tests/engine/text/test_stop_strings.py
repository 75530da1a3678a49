import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.text.stop_strings import Cut, StopStrings

Parts = list[str]


def stream(stops: list[str], parts: Parts, *, included: bool = False) -> tuple[list[str], str | None]:
    """Return the text shown for each part and flushed at the end, and the stop string."""
    watch = StopStrings(stops, included=included)
    shown = []
    for part in parts:
        cut = watch.feed(part)
        shown.append(cut.text)
        if cut.stop is not None:
            return shown, cut.stop
    return [*shown, watch.flush()], None


@pytest.mark.parametrize(
    ("stops", "parts", "shown", "stop"),
    [
        (["STOP"], ["no", "ne"], ["no", "ne", ""], None),
        (["STOP"], ["a STOP b"], ["a "], "STOP"),
        (["STOP"], ["a S", "TO", "P b"], ["a ", "", ""], "STOP"),
        (["STOP"], ["a S", "TO", "W b"], ["a ", "", "STOW b", ""], None),
        (["STOP"], ["a ST"], ["a ", "ST"], None),
        (["\n\n"], ["x\n", "\ny"], ["x", ""], "\n\n"),
        (["aab"], ["aa", "ab"], ["", "a"], "aab"),
        (["abcd", "bc"], ["ab", "c"], ["", "a"], "bc"),
        (["c", "abc"], ["xab", "c"], ["x", ""], "abc"),
        (["b", "abc"], ["a", "bc"], ["", "a"], "b"),
        (["é"], ["caf", "é"], ["caf", ""], "é"),
    ],
)
def test_text_is_cut_where_a_stop_string_first_completes(
    stops: list[str], parts: Parts, shown: Parts, stop: str | None
) -> None:
    assert stream(stops, parts) == (shown, stop)


def test_stop_string_is_included_if_requested() -> None:
    assert stream(["STOP"], ["a ST", "OP b"], included=True) == (["a ", "STOP"], "STOP")


def plain_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Apply the rule character by character."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=st.lists(st.integers(0, 30)),
)
def test_any_split_cuts_as_the_rule_does(text: str, stops: list[str], cuts: list[int]) -> None:
    borders = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    parts = [text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
    shown, stop = stream(stops, parts)
    assert ("".join(shown), stop) == plain_cut(text, stops)


@given(text=st.text("ab", max_size=20), stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_a_possible_stop_prefix_is_held_back(text: str, stops: list[str]) -> None:
    watch = StopStrings(stops)
    cut = watch.feed(text)
    if cut.stop is None:
        held = watch.flush()
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_stop_strings_that_nearly_match_cost_no_more() -> None:
    """Fifteen strings fail at every place of a text that could become the sixteenth, which holds back all of it."""
    stops = ["ab" + chr(ord("c") + i) * 254 for i in range(15)] + ["a" * 255]
    taken = []
    for _ in range(3):
        watch = StopStrings(stops)
        began = time.thread_time()
        assert all(watch.feed("a") == Cut("") for _ in range(250))
        taken.append(time.thread_time() - began)
    assert min(taken) < 0.025  # a tenth of a millisecond per token
