"""Prompts that begin alike go where their beginning is cached, unless that would make them wait."""

import asyncio
import json
import math
from itertools import islice
from time import perf_counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.balance import Candidate, Load, Picked, pick
from quire_gateway.prefixes import BLOCK_BYTES, MAX_BLOCKS, PrefixIndex, PrefixIndexes, Prompt, prompt_blocks


def blocks_of(**body: object) -> tuple[int, ...]:
    return prompt_blocks(msgspec.json.decode(json.dumps(body), type=Prompt))


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


LONG = "once upon a time " * 60
ALL = dict.fromkeys("abcdefg", math.inf)


def test_next_turn_of_a_conversation_has_the_blocks_of_the_turn_before():
    first, second = blocks_of(messages=chat(LONG)), blocks_of(messages=chat(LONG, "and then?" * 50))
    assert len(first) == 4
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_what_differs_at_the_beginning_has_no_block_in_common():
    plain = blocks_of(prompt=LONG)
    for other in (blocks_of(prompt="A" + LONG), blocks_of(prompt=LONG, cache_salt="tenant")):
        assert set(plain) & set(other) == set()


@pytest.mark.parametrize("body", [{}, {"prompt": "short"}, {"prompt": None}, {"prompt": [1, 2]}, {"messages": 7}])
def test_short_and_strange_prompts_have_no_blocks(body):
    assert blocks_of(**body) == ()


def test_token_ids_count_as_text():
    assert len(blocks_of(prompt=list(range(10_000, 10_200)))) > 3


def test_endless_prompts_are_hashed_only_so_far():
    assert len(blocks_of(prompt="x" * BLOCK_BYTES * MAX_BLOCKS * 3)) == MAX_BLOCKS


def test_share_counts_from_the_first_block_without_a_gap():
    index = PrefixIndex()
    index.served((1, 2, 3, 4), "a", 10.0)
    index.served((1, 2), "b", 10.0)
    index.served((9, 4), "c", 10.0)
    assert index.shares((1, 2, 3, 4), ALL) == {"a": 1.0, "b": 0.5}
    assert index.shares((1, 7, 3, 4), ALL) == {"a": 0.25, "b": 0.25}
    assert index.shares((7,), ALL) == index.shares((), ALL) == {}


def test_beginning_that_others_share_is_forgotten_last():
    index = PrefixIndex(max_entries=3)
    index.served((1, 2, 3, 4, 5), "a", 10.0)
    assert len(index) == 3
    assert index.shares((1, 2, 3, 4), ALL) == {"a": 0.75}


def test_what_a_replica_cannot_hold_any_more_is_forgotten():
    index = PrefixIndex()
    index.served((1, 2), "a", 600.0)
    index.served((1,), "b", 600.0)
    index.served((7,), "a", 400.0)
    assert index.shares((1, 2), {"a": 400.0, "b": 400.0}) == {"a": 1.0, "b": 0.5}
    index.served((8,), "a", 1.0)
    assert index.shares((1, 2), {"a": 400.0, "b": 400.0}) == {"b": 0.5}
    assert index.shares((1, 2), {"a": 401.0}) == {"a": 1.0}
    index.served((1,), "a", 0.0)
    assert index.shares((1, 2), {"a": 400.0}) == {"a": 0.5}, "its beginning was used again"


def test_replica_that_is_gone_holds_nothing_when_one_of_its_name_comes():
    index = PrefixIndex()
    index.served((1, 2), "a", 10.0)
    index.served((1, 2), "b", 10.0)
    index.forget({"a", "z"})
    index.served((9,), "a", 10.0)
    assert index.shares((1, 2), ALL) == {"b": 1.0}


@given(st.lists(st.tuples(st.lists(st.integers(0, 9), max_size=6), st.sampled_from("abcdefg")), max_size=40))
def test_index_is_bounded_and_shares_are_shares(served):
    index = PrefixIndex(max_entries=5)
    for blocks, id_ in served:
        index.served(blocks, id_, 10.0)
        assert len(index) <= 5
        assert all(0 < share <= 1 for share in index.shares(blocks, ALL).values())


def test_a_full_index_takes_prompts_about_as_fast_as_one_that_grows():
    index = PrefixIndex(max_entries=32_768)
    prompts = iter([range(start, start + 256) for start in range(0, 90_000, 256)])

    def quickest_of_many() -> float:
        took = []
        for blocks in islice(prompts, 120):
            started = perf_counter()
            index.served(blocks, "a", 10.0)
            took.append(perf_counter() - started)
        return sorted(took)[30]

    growing = quickest_of_many()
    assert len(index) < 32_768
    quickest_of_many()
    # Looking for the oldest entry from the beginning for each took over fifty times as long.
    assert len(index) == 32_768
    assert quickest_of_many() < 15 * growing


def test_indexes_of_all_models_are_bounded_together_and_the_largest_give_way():
    indexes = PrefixIndexes(max_entries=3000)
    small, large, larger = (indexes.open() for _ in range(3))
    small.served(range(200), "a", 10.0)
    for start in range(1000, 9000, 256):
        larger.served(range(start, start + 256), "a", 10.0)
        if start < 5000:
            large.served(range(start, start + 256), "b", 10.0)

    assert len(small) == 200
    assert small.shares(range(200), ALL) == {"a": 1.0}
    # A look comes after each 1,024 blocks.
    assert 1400 <= len(large) <= 1400 + 1024
    assert 1400 <= len(larger) <= 1400 + 1024
    # What came last is there, and what came first is not.
    assert larger.shares(range(8936, 9000), ALL) == {"a": 1.0}
    assert larger.shares(range(1000, 1256), ALL) == {}


def test_index_of_a_model_that_left_takes_no_place():
    indexes = PrefixIndexes(max_entries=3000)
    gone, stays = indexes.open(), indexes.open()
    gone.served(range(2900), "a", 10.0)
    indexes.close(gone)
    stays.served(range(2900), "a", 10.0)
    assert len(stays) == 2900


async def test_models_share_what_there_is_for_their_prefixes(gateway):
    await gateway.push(one=[], two=[])
    pools = gateway.gateway.fleet.pools
    indexes = gateway.gateway.fleet._prefixes
    assert indexes._indexes == {pools["one"].prefixes, pools["two"].prefixes}
    await gateway.push(two=[])
    assert indexes._indexes == {pools["two"].prefixes}


# --- what a hit is worth ---


def replica(id_: str, *, share: float = 0.0, running: float = 0.0, waiting: float = 0.0) -> Candidate:
    told = Load(running=running, waiting=waiting, kv_usage=0.0, finished_per_second=None, in_flight=0)
    return Candidate(id=id_, ready=True, suspect=False, in_flight=0, load=told, prefix_share=share)


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
def test_cached_prompts_go_home_unless_they_would_wait_there(candidates, expected):
    assert pick(candidates) == Picked(expected)


# --- through the gateway ---


async def test_conversations_stay_on_their_replica(gateway, replicas):
    fleet = [await replicas(name) for name in "abc"]
    await gateway.push(chat=[replica.endpoint() for replica in fleet])
    homes: dict[int, set[str]] = {}
    history = {talk: [LONG.replace("once", f"once {talk}")] for talk in range(6)}
    for turn in range(4):
        for talk, texts in history.items():
            _, body = await gateway.complete(messages=chat(*texts))
            homes.setdefault(talk, set()).add(body["served_by"])
            texts.append(f"turn {turn} " * 40)
    assert {len(home) for home in homes.values()} == {1}


async def test_one_hot_prompt_spreads_when_it_is_too_much_for_one(gateway, replicas):
    fleet = [await replicas(name) for name in "abc"]
    gate = asyncio.Event()
    for replica in fleet:

        async def hold(request, replica=replica):
            await gate.wait()
            return await replica.say_name(request)

        replica.behaviour = hold
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    calls = [asyncio.create_task(gateway.complete(messages=chat(LONG))) for _ in range(12)]
    while sum(len(replica.bodies) for replica in fleet) < 12:
        await asyncio.sleep(0.005)
    gate.set()
    await asyncio.gather(*calls)

    counts = sorted(len(replica.bodies) for replica in fleet)
    assert counts[0] >= 2
    assert counts[-1] <= 6
