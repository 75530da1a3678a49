"""Launches that are prepared once and run in every step with the same shapes: what CUDA graphs are for a GPU.

Python prepares a launch in some 10 microseconds, and a decode step has hundreds. A recording keeps the argument blocks
of all of them, so that one native call restores the counters in these and runs the chain, several times if its last
launch prepares the inputs of the next pass. What changes from step to step is copied to places that do not: inputs, and
the numbers of an attention plan.
"""

import contextlib
from array import array
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire_kernels.cpu_runtime.chain import HEAD
from quire_kernels.cpu_runtime.workers import SCOPE, Refuse, region_address, run_chain

_ALIGNMENT = 64
_LEAST_CHUNK_BYTES = 1 << 20


class LayerMemory:
    """Memory for the results of recorded launches, in two halves that the layers use alternately.

    A layer reads what the layer before has written, and nothing older. All recordings of a model share the memory: they
    never run at once.
    """

    def __init__(self) -> None:
        self._halves: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._half = self._chunk = self._used = 0

    def next_layer(self) -> None:
        """Let the following results overwrite those of the layer before the last one."""
        self._half, self._chunk, self._used = 1 - self._half, 0, 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        chunks = self._halves[self._half]
        while self._chunk < len(chunks) and self._used + size > chunks[self._chunk].numel():
            self._chunk, self._used = self._chunk + 1, 0
        if self._chunk == len(chunks):
            # Each is twice as large, or numbers of tokens that grow by one would leave all earlier chunks unused.
            grown = 2 * chunks[-1].numel() if chunks else _LEAST_CHUNK_BYTES
            chunks.append(new_tensor((max(size, grown),), torch.uint8))
        begin = self._used
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return chunks[self._chunk][begin : begin + size].view(dtype).view(shape)


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor that may be changed in any mode of torch, also if this is inference mode."""
    with torch.inference_mode(mode=False):
        return torch.empty(shape, dtype=dtype)


class Recording:
    """The launches of a ``recorded`` scope, with everything that must exist as long as they may run."""

    def __init__(self, memory: LayerMemory) -> None:
        self._memory = memory
        self._workers: list[int] = []
        self._blocks: list[array[int]] = []
        self._threads: list[int] = []
        self._threads_at: list[int | None] = []
        self._kept: list[object] = []
        self._refusals: list[tuple[int, Refuse]] = []

    def add(
        self,
        worker: int,
        block: "array[int]",
        threads: int,
        threads_at: int | None,
        keeps: tuple[object, ...],
        refuse: Refuse | None,
    ) -> None:
        if refuse is not None:
            self._refusals.append((len(self._blocks), refuse))
        self._workers.append(worker)
        self._blocks.append(block)
        self._threads.append(threads)
        self._threads_at.append(threads_at)
        self._kept.append(keeps)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._memory.empty(shape, dtype)

    def finish(self) -> None:
        """Prepare what ``run`` needs; nothing is added afterwards."""
        begins = [0, *accumulate(len(block) for block in self._blocks)]
        self._first = np.concatenate([np.asarray(block) for block in self._blocks])
        self._now = np.empty_like(self._first)
        self._counts = np.array(self._threads, dtype=np.int64)
        places = self._now.ctypes.data + 8 * np.array(begins[:-1])
        own = (self._counts.ctypes.data + 8 * np.arange(len(self._counts))).tolist()
        counts = [place if given is None else given for place, given in zip(own, self._threads_at, strict=True)]
        launches = np.stack((np.array(self._workers), places, counts), axis=1)  # [launches, 3]
        self._codes = np.array([begins[number] + 2 for number, _ in self._refusals], dtype=np.int64)
        blocks = (self._first.ctypes.data, self._now.ctypes.data, len(self._now))
        head = np.zeros(HEAD, dtype=np.int64)
        head[1:] = (len(launches), 1, region_address(), *blocks, self._codes.ctypes.data, len(self._codes))
        self._chain = np.concatenate((head, launches.ravel()))
        self._chain_address = self._chain.ctypes.data

    def run(self, passes: int = 1) -> None:
        """Run all launches ``passes`` times, and raise the error of the first that failed."""
        self._chain[2] = passes
        run_chain(self._chain_address)
        codes = self._now[self._codes]
        if codes.any():
            first = int(np.flatnonzero(codes)[0])
            self._refusals[first][1](int(codes[first]))


@contextlib.contextmanager
def recorded(memory: LayerMemory) -> Iterator[Recording]:
    """Record this thread's launches instead of running them.

    Only ops whose ``launch`` names what it keeps can be recorded, and their results have no values before ``run``. No
    other code in the scope may read or write the contents of a tensor that such an op uses.
    """
    assert SCOPE.recorder is None, "recordings are not nested"
    recording = SCOPE.recorder = Recording(memory)
    try:
        yield recording
    finally:
        SCOPE.recorder = None
    recording.finish()
