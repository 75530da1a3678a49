"""Sums and gathers of tensors between processes on one machine, over memory that they share.

Each rank writes its tensor into a ring of chunks of its own, and every rank adds the chunks of all ranks in the order
of the ranks: one copy, one sum and no barrier. The sum is in float32 and rounded once, so that all ranks have the same
bits. Waiting threads spin for about 100 microseconds, then yield their core, then sleep.

Legend: N ranks, T rows, H columns.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import check_storage, refuse
from quire_kernels.dispatch import implementation

CHUNK_BYTES = 16 << 10
"""The bytes that a rank publishes at once: a part of an L1 cache."""
SLOTS = 64
"""The chunks of a rank's ring, which has room for two tensors of 512 KiB."""
_COUNTERS_BYTES = 128
"""The bytes of a rank's two counters, each in a cache line of its own."""
_PAGE = 4096


def shared_bytes(ranks: int) -> int:
    """Return the bytes of memory that ``ranks`` processes share."""
    return _rings_begin(ranks) + ranks * SLOTS * CHUNK_BYTES


def _rings_begin(ranks: int) -> int:
    return -(-ranks * _COUNTERS_BYTES // _PAGE) * _PAGE


class SharedRings:
    """One rank's side of the shared memory. All ranks call the same operations in the same order."""

    def __init__(self, memory: np.ndarray, *, rank: int, ranks: int) -> None:
        """Create the side of ``rank``.

        memory  [shared_bytes(ranks)] uint8, writable, shared by all ranks, and zero before the first operation

        Raise ArgumentError on other memory or an unknown rank.
        """
        if memory.dtype != np.uint8 or memory.shape != (shared_bytes(ranks),) or not memory.flags.writeable:
            refuse("all_reduce", "memory", f"is {memory.dtype}{memory.shape}; {shared_bytes(ranks)} bytes are needed")
        if not 0 <= rank < ranks:
            refuse("all_reduce", "rank", f"is {rank}; 0 to {ranks - 1} is needed")
        self._memory = memory  # keeps the mapping alive
        self._rank, self._ranks = rank, ranks
        self._chunks = 0
        self._scratch = torch.empty(CHUNK_BYTES, dtype=torch.float32)

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    @property
    def rings(self) -> int:
        """The address of the first rank's ring."""
        return self.address + _rings_begin(self._ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add the tensors of all ranks in place and return ``x``, which has the same bits on every rank.

        x  any shape, the same on every rank, contiguous

        Raise ArgumentError on other strides or dtypes.
        """
        check_storage("all_reduce", "x", x)
        if not x.is_contiguous():
            refuse("all_reduce", "x", "is not contiguous")
        if x.numel():
            arguments = (self.address, self.rings, self._rank, self._ranks, self._chunks)
            self._chunks += implementation("all_reduce", x.device.type).all_reduce(x, self._scratch, *arguments)
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """Return the columns of all ranks side by side on rank 0, and ``x`` on the others.

        x        [T, widths[rank]], contiguous; T and the dtype are the same on every rank
        returns  [T, sum(widths)] on rank 0

        Raise ArgumentError on other shapes, strides or dtypes.
        """
        check_storage("all_reduce", "x", x)
        if x.dim() != 2 or x.shape[1] != widths[self._rank] or not x.is_contiguous():
            refuse(
                "all_reduce", "x", f"has shape {tuple(x.shape)}; [rows, {widths[self._rank]}], contiguous, is needed"
            )
        parts = [x if rank == 0 else x.new_empty((len(x), width)) for rank, width in enumerate(widths)]
        if len(x) and max(widths):
            longest = len(x) * max(widths) * x.element_size()
            sources = parts if self._rank == 0 else [x] * len(parts)
            arguments = (self.address, self.rings, self._rank, self._ranks, self._chunks)
            self._chunks += implementation("all_reduce", x.device.type).gather(sources, longest, *arguments)
        return torch.cat(parts, dim=1) if self._rank == 0 else x
