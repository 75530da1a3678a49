"""Cached tokens are not computed again, and only the matching prompts find them."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.prefix_cache import extend_chain, root_digest

World = Any
PROMPT = list(range(1, 19))  # four full blocks of four, and two tokens


def chain(token_ids: list[int], *, root: bytes = b"", block_size: int = 4) -> list[bytes]:
    digests: list[bytes] = []
    extend_chain(digests, token_ids, root=root, block_size=block_size, upto=len(token_ids) // block_size)
    return digests


def test_digest_depends_on_all_preceding_tokens() -> None:
    one, other = chain([1, 2, 3, 4, 5, 6, 7, 8]), chain([9, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != other[0] and one[1] != other[1]
    assert chain([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]


def test_incremental_digests_equal_digests_computed_at_once() -> None:
    digests: list[bytes] = []
    for upto in (1, 1, 3, 4):
        extend_chain(digests, PROMPT, root=b"r", block_size=4, upto=upto)
    assert digests == chain(PROMPT, root=b"r")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"cache_salt": "None"}, {}),
        ({"cache_salt": "a", "family": 1}, {"cache_salt": "a", "family": 2}),
        ({"cache_salt": "a", "family": 1}, {"cache_salt": "a", "generation": 1}),
        ({"tenant": "a"}, {"tenant": "b"}),
        ({"tenant": "a"}, {"cache_salt": "a"}),
        ({"tenant": "None"}, {}),
        ({"tenant": "a", "gateway_tenant": "b"}, {"tenant": "a"}),
        ({"tenant": "a", "gateway_tenant": "b"}, {"tenant": "b", "gateway_tenant": "a"}),
        ({"adapter": 1}, {}),
        ({"adapter": 1}, {"adapter": 2}),
        ({"adapter": 1}, {"family": 1}),
    ],
)
def test_root_digest_depends_on_tenant_salt_and_generation(one: dict[str, Any], other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"tenant": None, "cache_salt": None}
    assert root_digest(**plain | one) != root_digest(**plain | other)


def cached_after(world: World, key: int, prompt: list[int], **options: Any) -> int:
    """Run one more request and return how many of its prompt tokens were cached."""
    world.add(key, prompt, **options)
    world.run()
    return int(world.cached[key])


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        pytest.param(PROMPT, 16, id="the same prompt: all full blocks"),
        pytest.param([*PROMPT[:10], 40, 41, 42], 8, id="a common beginning: the full blocks of it"),
        pytest.param(PROMPT[:16], 12, id="at least one token is left to compute"),
        pytest.param(PROMPT[1:], 0, id="the same tokens elsewhere: nothing"),
        pytest.param(PROMPT[:3], 0, id="less than a block: nothing"),
    ],
)
def test_second_request_finds_blocks_of_the_first(
    make_world: Callable[..., World], prompt: list[int], cached: int
) -> None:
    world = make_world()
    assert cached_after(world, 1, PROMPT) == 0
    assert cached_after(world, 2, prompt) == cached
    counters = world.engine.counters
    assert (counters.prefix_cache_queries, counters.prefix_cache_hits) == (len(PROMPT) + len(prompt), cached)


def test_sampled_tokens_are_found_as_a_prefix(make_world: Callable[..., World]) -> None:
    world = make_world()
    cached_after(world, 1, PROMPT, max_tokens=11)
    # 18 + 11 tokens, the last never computed: seven full blocks.
    assert cached_after(world, 2, [*PROMPT, *world.tokens[1], 5]) == 28


def test_requests_of_one_step_share_their_prompt(make_world: Callable[..., World]) -> None:
    world = make_world(budget=40)
    for key in range(3):
        world.add(key, PROMPT)
    world.step()
    assert world.engine.gauges().num_running == 3
    assert world.engine.gauges().blocks_used == 4 + 3
    world.run()
    assert world.tokens[0] == world.tokens[1] == world.tokens[2]


@pytest.mark.parametrize(
    ("share", "salts", "cached"),
    [
        pytest.param("tenant", (None, None), 0, id="tenants are kept apart"),
        pytest.param("tenant", ("s", "s"), 0, id="a guessed salt opens nothing"),
        pytest.param("all", (None, None), 16, id="shared by all"),
        pytest.param("all", ("s", "s"), 16, id="a declared salt is shared on purpose"),
        pytest.param("all", ("s", None), 0, id="a salt keeps others out"),
    ],
)
def test_cached_tokens_reveal_nothing_about_other_tenants(
    make_world: Callable[..., World], share: str, salts: tuple[str | None, str | None], cached: int
) -> None:
    world = make_world(share=share)
    first, second = salts
    assert cached_after(world, 1, PROMPT, tenant="alice", salt=first) == 0
    assert cached_after(world, 2, PROMPT, tenant="bob", salt=second) == cached
    assert cached_after(world, 3, PROMPT, tenant="alice", salt=first) == 16, "within a tenant as before"


@pytest.mark.parametrize(("share", "cached"), [("tenant", 0), ("all", 16)])
def test_tenants_of_a_gateway_with_one_engine_key_are_apart(
    make_world: Callable[..., World], share: str, cached: int
) -> None:
    world = make_world(share=share)
    assert cached_after(world, 1, PROMPT, tenant="key", gateway_tenant="alice") == 0
    assert cached_after(world, 2, PROMPT, tenant="key", gateway_tenant="bob") == cached
    assert cached_after(world, 3, PROMPT, tenant="key") == cached
    assert cached_after(world, 4, PROMPT, tenant="key", gateway_tenant="alice") == 16


def test_salt_keeps_tenants_apart(make_world: Callable[..., World]) -> None:
    world = make_world()
    cached_after(world, 1, PROMPT, salt="one")
    assert cached_after(world, 2, PROMPT, salt="two") == 0
    assert cached_after(world, 3, PROMPT) == 0
    assert cached_after(world, 4, PROMPT, salt="one") == 16


def test_no_prefix_is_found_if_caching_is_off_or_reset(make_world: Callable[..., World]) -> None:
    off = make_world(caching=False)
    cached_after(off, 1, PROMPT)
    assert cached_after(off, 2, PROMPT) == 0
    assert off.engine.counters.prefix_cache_queries == 0
    forgotten = make_world()
    cached_after(forgotten, 1, PROMPT)
    forgotten.engine.forget_prefixes()
    assert forgotten.engine.gauges().blocks_cached == 0
    assert cached_after(forgotten, 2, PROMPT) == 0


def test_preempted_sequence_finds_its_cached_blocks(make_world: Callable[..., World]) -> None:
    computed = {}
    for caching in (True, False):
        world = make_world(num_blocks=12, max_num_seqs=2, budget=40, caching=caching)
        world.add(1, [1] * 15, max_tokens=20)
        world.add(2, [2] * 15, max_tokens=20)
        world.run()
        assert world.sequences[2].num_preemptions == 1
        computed[caching] = world.engine.counters.scheduled_tokens - 2 * (15 + 19)
    # The first sequence evicted the tail of its chain; the head was still there.
    assert 0 < computed[True] < computed[False]


def test_block_of_an_uncomputed_chunk_is_not_cached(make_world: Callable[..., World]) -> None:
    """Its first tokens are there, the rest was never computed, so no sequence may use it as a full block."""
    world = make_world(num_blocks=8, max_num_seqs=2, budget=4)
    world.add(1, [1, 1, 1], max_tokens=29)
    world.add(2, range(1, 22), max_tokens=2)
    while not world.engine.counters.preemptions:
        world.step()
    world.engine.cancel(1)
    world.run()
    assert world.sequences[2].num_preemptions == 1


def test_windowed_groups_match_prefixes_by_visible_blocks(make_world: Callable[..., World]) -> None:
    world = make_world(windows=(None, 6), num_blocks=16)
    cached_after(world, 1, PROMPT, max_tokens=1)
    # The windowed group released the first blocks, but it keeps them findable until they are reused.
    assert cached_after(world, 2, [*PROMPT, 30], max_tokens=1) == 16
