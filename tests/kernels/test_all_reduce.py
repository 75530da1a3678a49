"""Sums and gathers over shared memory: ranks are threads here, which the kernels do not know."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_kernels.all_reduce import CHUNK_BYTES, SLOTS, SharedRings, reference, shared_bytes
from quire_kernels.errors import ArgumentError

RING = SLOTS * CHUNK_BYTES


def on_ranks(ranks: int, run: Callable[[SharedRings, int], Tensor]) -> list[Tensor]:
    """Run a function on every rank at once, and return what each gave."""
    memory = np.zeros(shared_bytes(ranks), dtype=np.uint8)
    sides = [SharedRings(memory, rank=rank, ranks=ranks) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, sides, range(ranks)))


# The last two are longer than a ring, so chunks are replaced while they are read.
SHAPES = [(1,), (3, 7), (32, 4096), (CHUNK_BYTES // 4 + 1,), (RING // 4, 5), (RING // 2 + 3,)]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_sum_equals_the_reference_on_every_rank(ranks: int, dtype: torch.dtype) -> None:
    inputs = [[torch.randn(shape).to(dtype) for shape in SHAPES] for _ in range(ranks)]
    expected = [reference.all_reduce([inputs[rank][place] for rank in range(ranks)]) for place in range(len(SHAPES))]

    def reduce_all(side: SharedRings, rank: int) -> Tensor:
        return torch.cat([side.all_reduce(x.clone()).flatten() for x in inputs[rank]])

    for found in on_ranks(ranks, reduce_all):
        torch.testing.assert_close(found, torch.cat([one.flatten() for one in expected]), rtol=0, atol=0)


@pytest.mark.parametrize("widths", [(5, 5), (3, 4, 0), (1, 2, 70_000)])
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_columns_arrive_on_the_first_rank(rows: int, widths: tuple[int, ...], dtype: torch.dtype) -> None:
    parts = [torch.randn(rows, width).to(dtype) for width in widths]

    def gather(side: SharedRings, rank: int) -> Tensor:
        side.all_reduce(torch.ones(100))
        found = side.gather(parts[rank], widths)
        side.all_reduce(torch.ones(100))
        return found

    found = on_ranks(len(widths), gather)
    torch.testing.assert_close(found[0], torch.cat(parts, dim=1), rtol=0, atol=0)


def test_a_slow_rank_delays_the_others_without_harm() -> None:
    """Ranks sleep while one is late, and no chunk is replaced before that one has read it."""
    rounds = 30

    def run(side: SharedRings, rank: int) -> Tensor:
        total = torch.zeros(RING // 8)
        for number in range(rounds):
            if rank == 1 and number % 10 == 5:
                torch.randn(400, 400) @ torch.randn(400, 400)
            total += side.all_reduce(torch.full((RING // 8,), float(number + rank)))
        return total

    expected = float(sum(2 * number + 1 for number in range(rounds)))
    for found in on_ranks(2, run):
        assert found.eq(expected).all()


def test_a_gather_replaces_no_chunk_of_a_sum_that_a_slow_rank_reads() -> None:
    """The last of three ranks has published its part of a sum, and not yet read that of the others."""
    ranks, columns, widths = 3, CHUNK_BYTES, (RING // 4,) * 3  # four chunks, and as many as a ring has
    memory = np.zeros(shared_bytes(ranks), dtype=np.uint8)
    counters = memory[: 128 * ranks].view(np.int64).reshape(ranks, 2, 8)[:, :, 0]  # [rank, published or read]
    rings = memory[-ranks * RING :].reshape(ranks, RING)

    def run(rank: int) -> None:
        side = SharedRings(memory, rank=rank, ranks=ranks)
        side.all_reduce(torch.ones(columns))
        side.gather(torch.full((1, widths[rank]), 2.0), widths)

    counters[2, 0] = 4
    with ThreadPoolExecutor(2) as pool:
        done = [pool.submit(run, rank) for rank in (0, 1)]
        while counters[1, 0] < SLOTS:  # the gather fills the rest of the ring
            time.sleep(0.001)
        time.sleep(0.02)  # time to go on, which it must not
        read = rings[1].view(np.float32)[:columns].copy()
        counters[2, 1] = counters[2, 0] = 4 + SLOTS  # the last rank reads the sum, and publishes its part of the gather
        for each in done:
            each.result()
    assert (read == 1.0).all()


@pytest.mark.parametrize("size", [0, shared_bytes(2) - 1])
def test_memory_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ArgumentError, match="bytes are needed"):
        SharedRings(np.zeros(size, dtype=np.uint8), rank=0, ranks=2)


def test_an_unknown_rank_is_refused() -> None:
    with pytest.raises(ArgumentError, match="rank"):
        SharedRings(np.zeros(shared_bytes(2), dtype=np.uint8), rank=2, ranks=2)


def test_other_strides_and_shapes_are_refused() -> None:
    side = SharedRings(np.zeros(shared_bytes(2), dtype=np.uint8), rank=0, ranks=2)
    with pytest.raises(ArgumentError, match="contiguous"):
        side.all_reduce(torch.zeros(4, 4)[:, :3])
    with pytest.raises(ArgumentError, match="is needed"):
        side.gather(torch.zeros(2, 3), (4, 4))
