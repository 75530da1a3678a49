"""A stand-in for the driver of a GPU that is not present: kernels are compiled for it as in service, and never run.

Within ``standing_in`` ops launch their Triton kernels on CPU tensors. Everything on the host is real: the checks of the
ops, Triton's specialization and compilation, the cache of compiled kernels, the arguments of each launch. Only the
launch itself is replaced: it compares the arguments with the signature for which the kernel was compiled, and reports
them.

A process can stand in for one kind of GPU, because Triton keeps what it compiled. Triton must not interpret in it
(TRITON_INTERPRET).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver

from quire_kernels import dispatch
from quire_kernels.errors import KernelError
from quire_kernels.triton_runtime import config, device
from quire_kernels.triton_runtime.target import Target

_MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}
_COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256, "gfx1100": 96}
_LDS = {"gfx950": 160 << 10}
"""The bytes of a program's shared memory on AMD's GPUs that have more than 64 KiB."""
_SHARED_MEMORY = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""The bytes of shared memory of a program by compute capability, where it has more than the 99 KiB of the others."""
_MOST_THREADS = 1024
_INTEGER_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "u8": 8, "u16": 16, "u32": 32, "u64": 64}


class LaunchError(KernelError, AssertionError):
    """A launch with arguments for which its kernel was not compiled; the message names kernel and argument."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A launch. ``arguments`` are those of the kernel that are not constants, by name; pointers are integers."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    arguments: dict[str, int | float]
    pointers: frozenset[str]
    """The names of the arguments that are addresses."""
    num_warps: int
    shared_bytes: int


Observer = Callable[[Launched], None]


@dataclass(slots=True)
class StandIn:
    """The state of the stand-in. ``current_stream`` returns the number of the stream on which a launch is issued."""

    target: Target
    observe: Observer | None = None
    current_stream: Callable[[], int] = lambda: 0
    launches: int = 0
    """The launches since the start."""


# One for the process: a kernel that Triton has compiled keeps its launcher.
_states: dict[str, StandIn] = {}


@contextmanager
def standing_in(gpu: int | str) -> Iterator[StandIn]:
    """Let ops launch kernels on CPU tensors, compiled for a GPU. Yield the state.

    gpu  NVIDIA's compute capability, such as 90, or AMD's architecture, such as "gfx942"
    """
    if dispatch.INTERPRETED:
        raise KernelError("TRITON_INTERPRET=1 is set: kernels are interpreted in this process; unset it")
    target = Target.named(gpu if isinstance(gpu, str) else f"sm_{gpu}")
    state = _states.setdefault(target.name, StandIn(target=target))
    if len(_states) > 1:
        raise KernelError(f"this process stood in for {next(iter(_states))}; another needs its own process")
    before = driver._active
    driver.set_active(_Driver(state))
    properties = device.DeviceProperties(
        name=target.name,
        capability=divmod(target.capability, 10),
        amd=target.amd,
        multiprocessors=_multiprocessors(target),
        shared_memory_bytes=_shared_memory(target),
    )
    try:
        with cpu_device(properties), _triton_on_cpu():
            yield state
    finally:
        driver.set_active(before)
        config.forget()
        state.observe, state.current_stream, state.launches = None, lambda: 0, 0


@contextmanager
def cpu_device(properties: device.DeviceProperties) -> Iterator[None]:
    """Let CPU tensors have the properties of a GPU instead of those of Triton's interpreter."""
    here = device._cpu_device
    before = here.properties, here.target
    here.properties, here.target = properties, device._target(properties)
    _forget_devices()
    try:
        yield
    finally:
        here.properties, here.target = before
        _forget_devices()


def _forget_devices() -> None:
    for cached in (device.device_properties, device.target_of, device.require_fp8, device._require_capability):
        cached.cache_clear()


@contextmanager
def _triton_on_cpu() -> Iterator[None]:
    """Let ops launch Triton's kernels on CPU tensors."""
    dispatch.INTERPRETED = True
    dispatch.implementation.cache_clear()
    try:
        yield
    finally:
        dispatch.INTERPRETED = False
        dispatch.implementation.cache_clear()


def _multiprocessors(target: Target) -> int:
    return _COMPUTE_UNITS[target.amd] if target.amd else _MULTIPROCESSORS.get(target.capability, 100)


def _shared_memory(target: Target) -> int:
    return _LDS.get(target.amd, 64 << 10) if target.amd else _SHARED_MEMORY.get(target.capability, 99 << 10)


class _Utils:
    """The functions of the driver that Triton calls when it loads a kernel."""

    def __init__(self, state: StandIn) -> None:
        self._state = state

    def get_device_properties(self, index: int) -> dict[str, int]:
        return {
            "max_shared_mem": _shared_memory(self._state.target),
            "multiprocessor_count": _multiprocessors(self._state.target),
        }

    def load_binary(self, name: str, binary: bytes, shared: int, index: int) -> tuple[object, str, int, int, int]:
        """Return the module, the function, its registers, its spilled registers, and its most threads."""
        return object(), name, 0, 0, _MOST_THREADS


class _Driver(DriverBase):
    def __init__(self, state: StandIn) -> None:
        super().__init__()
        self._state = state
        self.utils = _Utils(state)

    def launcher_cls(self, source: Any, metadata: Any) -> "_Launcher":
        return _Launcher(self._state, source, metadata)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError("no launcher is compiled")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing runs")

    def get_current_target(self) -> GPUTarget:
        target = self._state.target
        return (
            GPUTarget("hip", target.amd, target.warp_size) if target.amd else GPUTarget("cuda", target.capability, 32)
        )

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, index: int) -> int:
        return self._state.current_stream()


class _Launcher:
    """The launches of one compiled kernel."""

    def __init__(self, state: StandIn, source: Any, metadata: Any) -> None:
        self._state = state
        self._name: str = metadata.name
        self._kinds: list[tuple[str, str]] = list(source.signature.items())
        self._divisible = {path[0] for path, found in source.attrs.items() if ["tt.divisibility", 16] in found}
        self._metadata = metadata

    def __call__(
        self,
        x: int,
        y: int,
        z: int,
        stream: int,
        function: object,
        packed: object,
        launch_metadata: object,
        enter_hook: object,
        exit_hook: object,
        *arguments: Any,
    ) -> None:
        self._state.launches += 1
        if self._state.observe is not None:
            self._state.observe(self._launched((x, y, z), stream, arguments))

    def _launched(self, grid: tuple[int, int, int], stream: int, arguments: tuple[Any, ...]) -> Launched:
        if len(arguments) != len(self._kinds):
            raise LaunchError(f"{self._name}: {len(arguments)} arguments; the kernel has {len(self._kinds)}")
        if not all(1 <= size < 1 << 31 for size in grid) or max(grid[1:]) > 65_535:
            raise LaunchError(f"{self._name}: grid {grid} exceeds what a GPU launches, or is empty")
        values: dict[str, int | float] = {}
        pointers = []
        for index, ((name, kind), value) in enumerate(zip(self._kinds, arguments, strict=True)):
            if kind == "constexpr":
                continue
            given = value.data_ptr() if isinstance(value, torch.Tensor) else value
            if problem := _problem(kind, given, divisible=index in self._divisible):
                raise LaunchError(f"{self._name}: {name} is {given!r}, {problem}")
            values[name] = given
            if kind.startswith("*"):
                pointers.append(name)
        return Launched(
            kernel=self._name,
            grid=grid,
            stream=stream,
            arguments=values,
            pointers=frozenset(pointers),
            num_warps=self._metadata.num_warps,
            shared_bytes=self._metadata.shared,
        )


def _problem(kind: str, value: object, *, divisible: bool) -> str | None:
    """Return why a value does not fit the type for which the kernel was compiled, or None."""
    if kind in ("fp16", "bf16", "fp32", "fp64"):
        return None if isinstance(value, float | int) else f"and the kernel was compiled for {kind}"
    if not isinstance(value, int):
        return f"and the kernel was compiled for {kind}"
    if divisible and value % 16:
        return "and the kernel was compiled for multiples of 16"
    if kind.startswith("*"):
        return None if value else "a null pointer"
    bits = _INTEGER_BITS[kind]
    low, high = (0, 1 << bits) if kind.startswith("u") else (-(1 << (bits - 1)), 1 << (bits - 1))
    return None if low <= value < high else f"which {kind} cannot hold"
