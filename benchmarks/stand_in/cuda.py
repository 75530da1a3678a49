"""A stand-in for ``torch.cuda`` that knows the order of work: streams, events and graphs over memory of the host.

Tensors are on the CPU, and kernels are those of ``quire_kernels.triton_runtime.stand_in``, which run nothing. Every
stream, and the host, has a vector clock (Mattern, 1989): how far each stream has come for certain. With it the stand-in
finds what goes wrong on a GPU now and then, in every run:

- two streams access the same memory of a KV cache, its staging area or its swap space, one of them writes, and no event
  orders them;
- the host changes pinned memory while it is uploaded, or reads a download before it waited for it (it is full of one
  byte until then);
- the host waits, uploads or downloads during the capture of a graph, or a graph is replayed whose memory was freed.

Products in float8 (``torch._scaled_mm``) are recorded and not computed: their arguments are compared with what a GPU
accepts, which is less than a CPU does.
"""

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from quire_engine.runner.device.accelerator import CudaAccelerator
from quire_kernels.triton_runtime.stand_in import Launched, StandIn, first_tokens

POISON = 0x6B
_SWAP = "_swap_blocks_kernel"

_SCALED_PRODUCT = torch.ops.aten._scaled_mm.default

Clock = dict[int, int]


class OrderError(AssertionError):
    """Work that a GPU may run in another order than the host expects."""


class ProductError(AssertionError):
    """A product in float8 that a GPU would refuse; the message names the argument."""


@dataclass(slots=True)
class Access:
    """The last accesses of an address: the last write, and later reads, by stream and time."""

    write: tuple[int, int] | None = None
    reads: Clock = field(default_factory=dict)


@dataclass(slots=True)
class Work:
    """A launch or copy. ``reads`` and ``writes`` are the addresses whose order is checked."""

    name: str
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    effect: Callable[[], None] | None = None


class StandInStream:
    """A stream, by its number. ``cuda_stream`` is its handle for launches."""

    def __init__(self, cuda: "StandInCuda", number: int) -> None:
        self._cuda, self.cuda_stream = cuda, number
        self.clock: Clock = {}

    def wait_event(self, event: "StandInEvent") -> None:
        assert event.clock is not None, "the event was not recorded"
        _join(self.clock, event.clock)


class StandInEvent:
    def __init__(self, cuda: "StandInCuda") -> None:
        self._cuda = cuda
        self.clock: Clock | None = None

    def record(self) -> None:
        self.clock = dict(self._cuda.current_stream().clock)

    def synchronize(self) -> None:
        assert self.clock is not None, "the event was not recorded"
        self._cuda.wait(self.clock)

    def elapsed_time(self, later: "StandInEvent") -> float:
        for event in (self, later):
            assert event.clock is not None
            if not _reached(event.clock, self._cuda.host):
                raise OrderError("the time between events is read before the host waited for both")
        return 0.0


class StandInGraph:
    """A captured graph: work, and the memory that it uses and does not own."""

    def __init__(self, cuda: "StandInCuda") -> None:
        self._cuda = cuda
        self.work: list[Work] = []
        self.memory: dict[int, StorageWeakRef] = {}

    def pool(self) -> object:
        return self

    def replay(self) -> None:
        self._cuda.replays += 1
        for address, storage in self.memory.items():
            if storage.expired():
                raise OrderError(f"a graph is replayed whose memory at {address:#x} was freed")
        for work in self.work:
            self._cuda.issue(work)


@dataclass(slots=True)
class _Copy:
    """An upload or a download on its way, until the host knows that it is done."""

    clock: Clock
    finish: Callable[[], None]


class StandInCuda:
    """The functions of ``torch.cuda`` that ``CudaAccelerator`` uses, and the order of all work."""

    def __init__(self, stand_in: StandIn) -> None:
        self.host: Clock = {}
        self.replays = 0
        self.launches: list[Launched] = []
        self.products: list[tuple[int, int, int]] = []
        """Rows, inputs and outputs of each product in float8."""
        self.names: list[str] = []
        """The names of all issued work, also that of graphs."""
        self.capturing: StandInGraph | None = None
        self._streams: list[StandInStream] = []
        self._current = self.Stream()
        self._accesses: dict[int, Access] = {}
        self._copies: list[_Copy] = []
        self._memory = _Memory(self)
        stand_in.observe = self._launched
        stand_in.current_stream = lambda: self._current.cuda_stream

    # The names are torch's.
    def Stream(self, device: object = None) -> StandInStream:
        self._streams.append(StandInStream(self, len(self._streams)))
        return self._streams[-1]

    def Event(self, enable_timing: bool = False, blocking: bool = False) -> StandInEvent:
        return StandInEvent(self)

    def CUDAGraph(self) -> StandInGraph:
        return StandInGraph(self)

    def current_stream(self, device: object = None) -> StandInStream:
        return self._current

    @contextmanager
    def stream(self, stream: StandInStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    @contextmanager
    def graph(self, graph: StandInGraph, pool: object = None) -> Iterator[None]:
        with self.stream(self.Stream()):
            self.capturing = graph
            try:
                yield
            finally:
                self.capturing = None

    def synchronize(self, device: object = None) -> None:
        everything: Clock = {}
        for stream in self._streams:
            _join(everything, stream.clock)
        self.wait(everything)

    def wait(self, clock: Clock) -> None:
        """Let the host wait until the streams have come so far."""
        self.refuse_in_capture("waits for the device")
        _join(self.host, clock)
        done = [copy for copy in self._copies if _reached(copy.clock, self.host)]
        self._copies = [copy for copy in self._copies if copy not in done]
        for copy in done:
            copy.finish()

    def refuse_in_capture(self, what: str) -> None:
        if self.capturing is not None:
            raise OrderError(f"the host {what} while a graph is captured")

    def issue(self, work: Work) -> Clock:
        """Issue work on the current stream, or add it to the graph that is captured. Return the clock at its end."""
        if self.capturing is not None:
            self.capturing.work.append(work)
            return {}
        self.names.append(work.name)
        stream = self._current
        _join(stream.clock, self.host)
        now = stream.clock[stream.cuda_stream] = stream.clock.get(stream.cuda_stream, 0) + 1
        for address in work.reads | work.writes:
            self._access(work, address, stream, now)
        if work.effect is not None:
            work.effect()
        return dict(stream.clock)

    def copying(self, clock: Clock, finish: Callable[[], None]) -> None:
        self._copies.append(_Copy(clock, finish))

    def multiply(self, function: Any, args: Any, kwargs: Any) -> Tensor:
        """Record a product in float8, and return memory of its result's shape. Raise ProductError."""
        given = dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)) | kwargs
        rows, outputs = given["self"].shape[0], given["mat2"].shape[1]
        if problem := _product_problem(given):
            raise ProductError(f"torch._scaled_mm: {problem}")
        self.products.append((rows, given["self"].shape[1], outputs))
        self.issue(Work("_scaled_mm"))
        return torch.empty((rows, outputs), dtype=torch.bfloat16)

    def watching(self) -> TorchDispatchMode:
        """Return a context in which the memory of torch's tensors is watched."""
        return self._memory

    def _access(self, work: Work, address: int, stream: StandInStream, now: int) -> None:
        access = self._accesses.setdefault(address, Access())
        earlier = [access.write] if access.write is not None else []
        if address in work.writes:
            earlier += access.reads.items()
        for number, time in earlier:
            if number != stream.cuda_stream and stream.clock.get(number, 0) < time:
                kind = "write" if address in work.writes else "read"
                raise OrderError(
                    f"{work.name} on stream {stream.cuda_stream} may {kind} {address:#x} before stream {number} is done"
                )
        if address in work.writes:
            access.write, access.reads = (stream.cuda_stream, now), {}
        else:
            access.reads[stream.cuda_stream] = now

    def _launched(self, launched: Launched) -> None:
        self.launches.append(launched)
        if launched.stream != self._current.cuda_stream:
            raise OrderError(f"{launched.kernel} is launched on stream {launched.stream}, which is not current")
        if self.capturing is not None:
            self._memory.keep(self.capturing, launched)
        reads, writes = _footprint(launched)
        self.issue(Work(launched.kernel, reads, writes, functools.partial(first_tokens, launched)))


class RehearsedAccelerator(CudaAccelerator):
    """The accelerator of a GPU over the stand-in, with copies that arrive as late as they may."""

    def __init__(self, cuda: StandInCuda) -> None:
        super().__init__(torch.device("cpu"), cuda)
        self._standing = cuda

    def pinned(self, num_bytes: int) -> Tensor:
        self._standing.refuse_in_capture("allocates pinned memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    def upload(self, source: Tensor, target: Tensor | None = None) -> Tensor:
        self._standing.refuse_in_capture("uploads")
        copied = source.clone()
        clock = self._standing.issue(Work("upload"))

        def check() -> None:
            if not torch.equal(copied, source):
                raise OrderError("the host changed pinned memory before its upload was done")

        self._standing.copying(clock, check)
        return copied if target is None else target.copy_(copied)

    def download(self, tensor: Tensor) -> Tensor:
        self._standing.refuse_in_capture("downloads")
        content = tensor.clone()
        target = torch.empty_like(tensor)
        target.view(torch.uint8).fill_(POISON)

        @torch.inference_mode()
        def deliver() -> None:
            target.copy_(content)

        self._standing.copying(self._standing.issue(Work("download")), deliver)
        return target

    def copy_bytes(self, source: Tensor, target: Tensor) -> None:
        if not (source.is_contiguous() and target.is_contiguous() and source.shape == target.shape):
            raise OrderError("a copy engine copies contiguous memory of one size")
        read, written = (tensor.untyped_storage().data_ptr() for tensor in (source, target))

        def copy() -> None:
            target.copy_(source)

        self._standing.issue(Work("copy engine", frozenset((read,)), frozenset((written,)), copy))


class _Memory(TorchDispatchMode):
    """The storages that torch allocates, so that those used by a graph can be watched."""

    def __init__(self, cuda: StandInCuda) -> None:
        super().__init__()
        self._cuda = cuda
        self._owned: dict[int, tuple[int, StorageWeakRef, StandInGraph | None]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result: Any
        if function is _SCALED_PRODUCT:
            result = self._cuda.multiply(function, args, kwargs or {})
        else:
            result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu" and (storage := tensor.untyped_storage()):
                known = self._owned.get(storage.data_ptr())
                if known is None or known[1].expired():
                    self._owned[storage.data_ptr()] = (len(storage), StorageWeakRef(storage), self._cuda.capturing)
        return result

    def keep(self, graph: StandInGraph, launched: Launched) -> None:
        """Remember the memory outside of a graph that a launch of it uses."""
        for name in launched.pointers:
            address = int(launched.arguments[name])
            for begin, (size, storage, owner) in self._owned.items():
                if begin <= address < begin + size and owner is not graph and not storage.expired():
                    graph.memory[begin] = storage

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._owned.clear()


def _product_problem(given: dict[str, Any]) -> str | None:
    """Return why a GPU would refuse a row-wise product (torch's Blas.cpp; cuBLASLt, CUTLASS), or None."""
    left, right, bias = given["self"], given["mat2"], given.get("bias")
    (rows, inputs), outputs = left.shape, right.shape[1]
    if left.dtype != torch.float8_e4m3fn or right.dtype != torch.float8_e4m3fn:
        return f"operands are {left.dtype} and {right.dtype}"
    if right.shape[0] != inputs or inputs % 16 or outputs % 16:
        return f"{inputs} inputs and {outputs} outputs are no multiples of 16, or differ from {right.shape[0]}"
    if left.stride() != (inputs, 1) or right.stride() != (1, inputs) or left.data_ptr() % 16:
        return f"strides are {left.stride()} and {right.stride()}: dense rows and dense columns are needed"
    for name, scale, shape in (("scale_a", given["scale_a"], (rows, 1)), ("scale_b", given["scale_b"], (1, outputs))):
        if scale.dtype != torch.float32 or scale.shape != shape or not scale.is_contiguous():
            return f"{name} is {scale.dtype} {tuple(scale.shape)}; contiguous float32 {shape} is needed"
    if given.get("out_dtype") != torch.bfloat16 or (bias is not None and bias.dtype != torch.bfloat16):
        return "the result and the bias must be bfloat16"
    return None


def _footprint(launched: Launched) -> tuple[frozenset[int], frozenset[int]]:
    """Return the addresses that a launch reads and writes, of the memory that several streams use."""
    arguments = launched.arguments
    if launched.kernel == _SWAP:
        count = 2 * int(arguments["buffers"])
        table = np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(int(arguments["addresses"])))
        return frozenset(table[0::2].tolist()), frozenset(table[1::2].tolist())
    caches = frozenset(int(arguments[name]) for name in ("keys", "values") if name in arguments)
    return (frozenset(), caches) if launched.kernel == "_store_kv_kernel" else (caches, frozenset())


def _join(clock: Clock, other: Clock) -> None:
    for number, time in other.items():
        clock[number] = max(clock.get(number, 0), time)


def _reached(clock: Clock, by: Clock) -> bool:
    return all(by.get(number, 0) >= time for number, time in clock.items())
