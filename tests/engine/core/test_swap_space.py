"""Host blocks: allocated, freed, and copied with the next step."""

import pytest

from quire_engine.core.batch import BlockCopies
from quire_engine.core.swap_space import SwapSpace


def test_swap_space_allocates_and_releases_blocks() -> None:
    space = SwapSpace([4, 2])
    assert space.has_room([4, 2]) and not space.has_room([1, 3])
    taken = [space.copy_out(0, [7, 8, 9]), space.copy_out(1, [5])]
    assert space.num_used == 4 and space.has_room([1, 1]) and not space.has_room([2, 0])
    space.check_integrity(taken)
    space.release(taken)
    assert space.num_used == 0 and space.has_room([4, 2])


def test_pending_copies_are_returned_once() -> None:
    space = SwapSpace([4])
    taken = space.copy_out(0, [7, 8])
    assert space.take_copies() == ((BlockCopies(sources=[7, 8], targets=taken),), ())
    space.copy_in(0, taken, [3, 1])
    space.release([taken])
    assert space.take_copies() == ((), (BlockCopies(sources=taken, targets=[3, 1]),))
    assert space.take_copies() == ((), ())


def test_cancelled_copies_are_dropped() -> None:
    space = SwapSpace([4])
    one, other = space.copy_out(0, [7]), space.copy_out(0, [8])
    space.forget_copies([one])
    space.release([one])
    assert space.take_copies() == ((BlockCopies(sources=[8], targets=other),), ())


@pytest.mark.parametrize(("counts", "exists"), [([4], True), ([4, 2], True), ([4, 0], False), ([0], False)])
def test_swap_space_exists_if_every_group_has_blocks(counts: list[int], exists: bool) -> None:
    assert SwapSpace(counts).exists == exists


@pytest.mark.parametrize("held", [[[0, 1]], [[0, 0, 1]], [[0]]])
def test_lost_and_doubly_owned_blocks_are_detected(held: list[list[int]]) -> None:
    space = SwapSpace([4])
    space.copy_out(0, [5, 6, 7])
    with pytest.raises(AssertionError, match="lost or held twice"):
        space.check_integrity(held)
