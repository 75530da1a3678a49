"""The tensor group of ranks on one machine: memory without a name, which the kernel frees with the last process."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire_kernels.all_reduce import SharedRings, shared_bytes


def create_memory(ranks: int) -> int:
    """Return the descriptor of memory for ``ranks`` processes. Raise OSError if that is impossible."""
    descriptor = os.memfd_create("quire-ranks")
    os.ftruncate(descriptor, shared_bytes(ranks))
    return descriptor


class SharedMemoryGroup:
    """A ``model.divided.TensorGroup`` over the memory of ``create_memory``."""

    def __init__(self, descriptor: int, *, rank: int, ranks: int) -> None:
        """Map the memory; the descriptor may be closed afterwards."""
        mapped = mmap.mmap(descriptor, shared_bytes(ranks))
        self._rings = SharedRings(np.frombuffer(mapped, dtype=np.uint8), rank=rank, ranks=ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._rings.all_reduce(x.contiguous())

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._rings.gather(x.contiguous(), widths)
