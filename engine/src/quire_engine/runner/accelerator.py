"""The functions of a device that the runner uses: pinned memory, copies, marks in a stream of work, captured graphs.

On a GPU these are CUDA's. On a CPU, work is done when it is issued, and a captured graph is a call; this is also the
accelerator of Triton's interpreter. Nothing here knows batches.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from quire_engine.cpu_quota import usable_cpus
from quire_engine.runner.threads import ThreadChooser
from quire_kernels.dispatch import runs_triton

_CPUS_TO_SPIN = 4


class Mark(Protocol):
    """A point in a stream of work, after everything that was issued before it."""

    def wait(self) -> None:
        """Wait until the work has reached this point. Raise CUDA's error if there is one."""
        ...

    def seconds_since(self, earlier: "Mark") -> float:
        """Return the seconds between two marks of one stream that were both reached."""
        ...


class Graph(Protocol):
    def replay(self) -> None: ...


class Accelerator(Protocol):
    @property
    def device(self) -> torch.device: ...

    @property
    def is_device(self) -> bool:
        """True if the host stages inputs for it and need not wait for its work."""
        ...

    def begin(self, num_tokens: int) -> None:
        """Prepare for a step of so many tokens."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """Return bytes of host memory from which the device copies without blocking the host."""
        ...

    def upload(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        """Copy pinned memory to the device, into ``target`` or a new tensor, without blocking the host.

        ``source`` must keep its content until a later mark is reached, unless it is released.
        """
        ...

    def download(self, tensor: Tensor) -> Tensor:
        """Return a copy in host memory, which is complete when a later mark is reached."""
        ...

    def copy_bytes(self, source: Tensor, target: Tensor) -> None:
        """Copy contiguous memory between the device and pinned host memory without blocking the host.

        A copy engine of the device does so: no multiprocessor takes part.
        """
        ...

    def mark(self) -> Mark: ...

    def follow(self, mark: Mark) -> None:
        """Let the current stream continue only after the mark of another stream is reached."""
        ...

    def on_side(self) -> AbstractContextManager[object]:
        """Issue work on the side stream, for which the main stream does not wait."""
        ...

    def capture(self, work: Callable[[], None]) -> Graph:
        """Return a graph that repeats what ``work`` issues, on the same tensors; ``work`` may be called several times.

        Graphs share memory: tensors that a graph allocated itself are overwritten when another graph is replayed.
        """
        ...

    def close(self) -> None:
        """Wait for all work, and release the memory of graphs and the threads."""
        ...


def make_accelerator(device: torch.device) -> Accelerator:
    if device.type == "cuda":
        return CudaAccelerator(device)
    return CpuAccelerator(device, is_device=runs_triton(device.type))


@dataclass(frozen=True, slots=True)
class CudaMark:
    event: torch.cuda.Event

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        return cast(float, cast(CudaMark, earlier).event.elapsed_time(self.event)) / 1e3


class CudaAccelerator:
    """The accelerator of a GPU. ``cuda`` are the functions of ``torch.cuda``, which a rehearsal replaces."""

    is_device = True

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        # A thread that waits for an event otherwise keeps a CPU busy, which the API process may need.
        self._blocking = usable_cpus() < _CPUS_TO_SPIN
        self._side = cuda.Stream(device)
        self._graph_memory: Any = None

    def begin(self, num_tokens: int) -> None:
        pass

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        if target is None:
            return source.to(self.device, non_blocking=True)
        return target.copy_(source, non_blocking=True)

    def download(self, tensor: Tensor) -> Tensor:
        # The target is pinned memory, which torch reuses.
        return tensor.to("cpu", non_blocking=True)

    def copy_bytes(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> CudaMark:
        event = self._cuda.Event(enable_timing=True, blocking=self._blocking)
        event.record()
        return CudaMark(event)

    def follow(self, mark: Mark) -> None:
        self._cuda.current_stream(self.device).wait_event(cast(CudaMark, mark).event)

    def on_side(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = self._cuda.stream(self._side)
        return stream

    def capture(self, work: Callable[[], None]) -> Graph:
        # Once outside a graph, where kernels may be compiled and libraries allocate their own memory.
        work()
        self._cuda.synchronize(self.device)
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, pool=self._graph_memory):
            work()
        if self._graph_memory is None:
            self._graph_memory = graph.pool()
        return cast(Graph, graph)

    def close(self) -> None:
        self._cuda.synchronize(self.device)
        self._graph_memory = None


class CpuMark(float):
    """A mark without a stream, the time: everything issued before it is already done."""

    __slots__ = ()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: Mark) -> float:
        return self - cast(CpuMark, earlier)


@dataclass(frozen=True, slots=True)
class EagerGraph:
    work: Callable[[], None]

    def replay(self) -> None:
        self.work()


@dataclass(frozen=True, slots=True)
class CpuAccelerator:
    device: torch.device = torch.device("cpu")
    threads: ThreadChooser | None = None
    """The chooser of the number of threads of each step; None leaves it as it is."""
    is_device: bool = False
    """True if it stands for a GPU, as with Triton's interpreter."""

    def begin(self, num_tokens: int) -> None:
        if self.threads is not None:
            self.threads.prepare(num_tokens)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        return source if target is None else target.copy_(source)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor

    def copy_bytes(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def mark(self) -> CpuMark:
        return CpuMark(time.perf_counter())

    def follow(self, mark: Mark) -> None:
        pass

    def on_side(self) -> AbstractContextManager[object]:
        return nullcontext()

    def capture(self, work: Callable[[], None]) -> EagerGraph:
        return EagerGraph(work)

    def close(self) -> None:
        if self.threads is not None:
            self.threads.close()
