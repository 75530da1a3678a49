"""The replicas that have cached the beginning of a prompt, and the value of a cached prefix."""

import math
from itertools import islice
from time import perf_counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.routing import (
    Candidate,
    Load,
    Picked,
    PrefixIndex,
    PrefixIndexes,
    pick,
)

ALL = dict.fromkeys("abcdefg", math.inf)


def test_share_counts_from_the_first_block_without_a_gap():
    index = PrefixIndex()
    index.record((1, 2, 3, 4), "a", 10.0)
    index.record((1, 2), "b", 10.0)
    index.record((9, 4), "c", 10.0)
    assert index.shares((1, 2, 3, 4), ALL) == {"a": 1.0, "b": 0.5}
    assert index.shares((1, 7, 3, 4), ALL) == {"a": 0.25, "b": 0.25}
    assert index.shares((7,), ALL) == index.shares((), ALL) == {}


def test_first_blocks_of_a_prompt_are_evicted_last():
    index = PrefixIndex(max_entries=3)
    index.record((1, 2, 3, 4, 5), "a", 10.0)
    assert len(index) == 3
    assert index.shares((1, 2, 3, 4), ALL) == {"a": 0.75}


def test_blocks_that_a_replica_evicted_do_not_count():
    index = PrefixIndex()
    index.record((1, 2), "a", 600.0)
    index.record((1,), "b", 600.0)
    index.record((7,), "a", 400.0)
    assert index.shares((1, 2), {"a": 400.0, "b": 400.0}) == {"a": 1.0, "b": 0.5}
    index.record((8,), "a", 1.0)
    assert index.shares((1, 2), {"a": 400.0, "b": 400.0}) == {"b": 0.5}
    assert index.shares((1, 2), {"a": 401.0}) == {"a": 1.0}
    index.record((1,), "a", 0.0)
    assert index.shares((1, 2), {"a": 400.0}) == {"a": 0.5}, "its beginning was used again"


def test_new_replica_of_the_same_name_starts_empty():
    index = PrefixIndex()
    index.record((1, 2), "a", 10.0)
    index.record((1, 2), "b", 10.0)
    index.forget({"a", "z"})
    index.record((9,), "a", 10.0)
    assert index.shares((1, 2), ALL) == {"b": 1.0}


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6), st.sampled_from("abcdefg")), max_size=40))
def test_index_is_bounded_and_shares_are_fractions(served):
    index = PrefixIndex(max_entries=5)
    for blocks, id_ in served:
        index.record(blocks, id_, 10.0)
        assert len(index) <= 5
        assert all(0 < share <= 1 for share in index.shares(blocks, ALL).values())


def test_full_index_records_about_as_fast_as_a_growing_one():
    index = PrefixIndex(max_entries=32_768)
    prompts = iter([range(start, start + 256) for start in range(0, 90_000, 256)])

    def low_quantile() -> float:
        took = []
        for blocks in islice(prompts, 120):
            started = perf_counter()
            index.record(blocks, "a", 10.0)
            took.append(perf_counter() - started)
        return sorted(took)[30]

    growing = low_quantile()
    assert len(index) < 32_768
    low_quantile()
    # Searching the oldest entry from the start for each block took more than fifty times as long.
    assert len(index) == 32_768
    assert low_quantile() < 15 * growing


def test_largest_indexes_shrink_to_the_common_bound():
    indexes = PrefixIndexes(max_entries=3000)
    small, large, larger = (indexes.open() for _ in range(3))
    small.record(range(200), "a", 10.0)
    for start in range(1000, 9000, 256):
        larger.record(range(start, start + 256), "a", 10.0)
        if start < 5000:
            large.record(range(start, start + 256), "b", 10.0)

    assert len(small) == 200
    assert small.shares(range(200), ALL) == {"a": 1.0}
    # The total is checked after each 1,024 blocks.
    assert 1400 <= len(large) <= 1400 + 1024
    assert 1400 <= len(larger) <= 1400 + 1024
    # The last prompt is there, and the first one is not.
    assert larger.shares(range(8936, 9000), ALL) == {"a": 1.0}
    assert larger.shares(range(1000, 1256), ALL) == {}


def test_closed_index_does_not_count():
    indexes = PrefixIndexes(max_entries=3000)
    gone, stays = indexes.open(), indexes.open()
    gone.record(range(2900), "a", 10.0)
    indexes.close(gone)
    stays.record(range(2900), "a", 10.0)
    assert len(stays) == 2900


# --- the value of a cached prefix ---


def replica(id_: str, *, share: float = 0.0, running: float = 0.0, waiting: float = 0.0) -> Candidate:
    reported = Load(running=running, waiting=waiting, kv_usage=0.0, finished_per_second=None, in_flight=0)
    return Candidate(id_, reported, prefix_share=share)


CASES = {
    "cached": ([replica("a"), replica("b", share=0.9)], "b"),
    "the longer match": ([replica("a", share=0.5), replica("b", share=0.9)], "b"),
    "the emptier of two equal matches": ([replica("a", share=0.9, running=1), replica("b", share=0.9)], "b"),
    "a match of little": ([replica("a", share=0.1, running=3), replica("b", running=2)], "b"),
    "cached, but it would wait": ([replica("a", share=0.9, waiting=1), replica("b")], "b"),
    "cached, and a little busier": ([replica("a", running=3), replica("b", share=0.9, running=4)], "b"),
    "cached, but much busier": ([replica("a", share=0.9, running=8), replica("b", running=1)], "b"),
    "all wait alike": ([replica("a", waiting=3), replica("b", share=0.9, waiting=3)], "b"),
}


@pytest.mark.parametrize(("candidates", "expected"), CASES.values(), ids=CASES.keys())
def test_cached_prefix_attracts_unless_the_request_would_wait(candidates, expected):
    assert pick(candidates) == Picked(expected)
