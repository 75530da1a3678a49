"""The tensor group of ranks on one node: memory without a name, which the kernel frees with the last process."""

import mmap
import os
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire_kernels.all_reduce import SharedRings, shared_bytes


class SharedMemoryGroup:
    """A ``model.divided.TensorGroup`` over memory that all ranks have mapped."""

    def __init__(self, descriptor: int, *, rank: int, ranks: int) -> None:
        """Map the memory, and give it its size; the descriptor may be closed afterwards."""
        os.ftruncate(descriptor, shared_bytes(ranks))
        mapped = mmap.mmap(descriptor, shared_bytes(ranks))
        self._rings = SharedRings(np.frombuffer(mapped, dtype=np.uint8), rank=rank, ranks=ranks)

    def all_reduce(self, x: Tensor) -> Tensor:
        return self._rings.all_reduce(x.contiguous())

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._rings.gather(x.contiguous(), widths)
