"""Prompts with a common beginning go to the replica that cached it, unless they would have to wait there."""

import asyncio
import json

import msgspec
import pytest

from quire_gateway.prompt import BLOCK_BYTES, MAX_BLOCKS, Prompt, prompt_blocks


def blocks_of(**body: object) -> tuple[int, ...]:
    return prompt_blocks(msgspec.json.decode(json.dumps(body), type=Prompt))


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


LONG = "once upon a time " * 60


def test_next_turn_starts_with_the_blocks_of_the_previous_turn():
    first, second = blocks_of(messages=chat(LONG)), blocks_of(messages=chat(LONG, "and then?" * 50))
    assert len(first) == 4
    assert second[: len(first)] == first
    assert len(second) > len(first)


def test_different_beginnings_have_no_common_block():
    plain = blocks_of(prompt=LONG)
    for other in (blocks_of(prompt="A" + LONG), blocks_of(prompt=LONG, cache_salt="tenant")):
        assert set(plain) & set(other) == set()


@pytest.mark.parametrize("body", [{}, {"prompt": "short"}, {"prompt": None}, {"prompt": [1, 2]}, {"messages": 7}])
def test_short_and_invalid_prompts_have_no_blocks(body):
    assert blocks_of(**body) == ()


def test_token_ids_count_as_text():
    assert len(blocks_of(prompt=list(range(10_000, 10_200)))) > 3


def test_at_most_max_blocks_are_hashed():
    assert len(blocks_of(prompt="x" * BLOCK_BYTES * MAX_BLOCKS * 3)) == MAX_BLOCKS


async def test_each_served_model_has_a_prefix_index(gateway):
    await gateway.push(one=[], two=[])
    pools = gateway.gateway.fleet.pools
    indexes = gateway.gateway.fleet._prefixes
    assert indexes._indexes == {pools["one"].prefixes, pools["two"].prefixes}
    await gateway.push(two=[])
    assert indexes._indexes == {pools["two"].prefixes}


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


async def test_hot_prompt_spreads_over_replicas(gateway, replicas):
    fleet = [await replicas(name) for name in "abc"]
    gate = asyncio.Event()
    for replica in fleet:
        replica.answer_after(gate)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    calls = [asyncio.create_task(gateway.complete(messages=chat(LONG))) for _ in range(12)]
    while sum(len(replica.bodies) for replica in fleet) < 12:
        await asyncio.sleep(0.005)
    gate.set()
    await asyncio.gather(*calls)

    counts = sorted(len(replica.bodies) for replica in fleet)
    assert counts[0] >= 2
    assert counts[-1] <= 6
