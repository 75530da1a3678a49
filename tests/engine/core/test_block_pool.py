"""Blocks are allocated in ascending order of value, found again by digest, and never lost."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.block_pool import BlockPool


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def pool_with_chains(num_blocks: int, *lengths: int) -> tuple[BlockPool, list[list[int]]]:
    """Return a pool whose chains of published blocks were released one after another."""
    pool = BlockPool(num_blocks)
    chains = [pool.allocate(length) for length in lengths]
    for chain in chains:
        for block in chain:
            pool.publish(block, digest(block))
    for chain in chains:
        pool.release(chain)
    return pool, chains


def test_blank_blocks_are_allocated_before_cached_ones() -> None:
    pool, [chain] = pool_with_chains(6, 3)
    assert not set(pool.allocate(3)) & set(chain)
    assert pool.num_cached == 3


def test_oldest_chain_is_evicted_first_from_its_tail() -> None:
    pool, [old, new] = pool_with_chains(5, 3, 2)
    order = [pool.allocate(1)[0] for _ in range(5)]
    assert order == [*reversed(old), *reversed(new)]


def test_evicted_block_is_not_found() -> None:
    pool, [chain] = pool_with_chains(2, 2)
    assert [pool.find(digest(block)) for block in chain] == chain
    pool.allocate(1)
    assert [pool.find(digest(block)) for block in chain] == [chain[0], None]
    assert pool.num_cached == 1


def test_first_of_two_equal_blocks_stays_cached() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.publish(first, digest(1))
    pool.publish(second, digest(1))
    assert pool.find(digest(1)) == first
    pool.release([second])
    assert pool.num_cached == 0
    pool.check_integrity({first: 1})


def test_reset_blocks_are_free_and_not_found() -> None:
    pool, [chain] = pool_with_chains(4, 3)
    pool.forget()
    assert pool.num_cached == 0 and pool.num_free == 4
    assert [pool.find(digest(block)) for block in chain] == [None] * 3
    pool.check_integrity({})


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda pool: pool.check_integrity({}), "1 references, 0 holders"),
        (lambda pool: pool.check_integrity({0: 2}), "1 references, 2 holders"),
        (lambda pool: (pool.release([0]), pool.release([0])), "0 was released more often than taken"),
    ],
)
def test_lost_and_twice_released_blocks_are_detected(break_it: Callable[[BlockPool], None], complaint: str) -> None:
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match=complaint):
        break_it(pool)


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "drop", "publish"]), st.integers(0, 50)), max_size=60))
def test_any_use_conserves_blocks(script: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    held: list[int] = []
    for kind, number in script:
        if kind == "take" and pool.num_free:
            held += pool.allocate(min(pool.num_free, 1 + number % 3))
        elif kind == "share":
            found = pool.find(digest(number % 12))
            if found is not None:
                pool.touch([found])
                held.append(found)
        elif kind == "drop" and held:
            pool.release([held.pop(number % len(held))])
        elif kind == "publish" and held:
            pool.publish(held[number % len(held)], digest(number % 12))
        pool.check_integrity({block: held.count(block) for block in held})
        assert pool.num_free + len(set(held)) == pool.num_blocks
