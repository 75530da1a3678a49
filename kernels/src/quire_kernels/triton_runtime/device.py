"""The properties of a device, read once. A kernel's launch calls ``require_device`` first.

With Triton's interpreter the device is the CPU, with the properties of a small Hopper.
"""

import functools
from dataclasses import dataclass

import torch
from triton.runtime import driver

from quire_kernels.errors import ArgumentError, UnsupportedDeviceError
from quire_kernels.triton_runtime.target import AMD_ARCHITECTURES, INTERPRETER, Target, amd_architecture

OLDEST = (8, 0)
"""The oldest compute capability with bfloat16 and asynchronous copies, which every kernel needs: Ampere."""
OLDEST_WITH_FP8 = (8, 9)
"""The oldest compute capability with conversions from and to float8 e4m3: Ada."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProperties:
    name: str
    capability: tuple[int, int]
    """NVIDIA's compute capability: major and minor. Torch gives AMD's GPUs one too, which means something else."""
    amd: str = ""
    """AMD's name of the architecture, such as "gfx942", and empty for others."""
    multiprocessors: int
    shared_memory_bytes: int
    """The maximum for one program."""


@dataclass(slots=True)
class _CpuDevice:
    """The GPU for which CPU tensors stand: Triton's interpreter, unless a test sets another."""

    properties: DeviceProperties
    target: Target


_INTERPRETED_DEVICE = DeviceProperties(
    name="interpreter", capability=(9, 0), multiprocessors=4, shared_memory_bytes=227 << 10
)
_cpu_device = _CpuDevice(properties=_INTERPRETED_DEVICE, target=INTERPRETER)


@functools.cache
def device_properties(device: torch.device) -> DeviceProperties:
    """Return the properties of a tensor's device; ``device`` has an index unless it is the CPU."""
    if device.type != "cuda":
        return _cpu_device.properties
    limits = driver.active.utils.get_device_properties(device.index)
    return DeviceProperties(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        amd=amd_architecture(device.index),
        multiprocessors=limits["multiprocessor_count"],
        shared_memory_bytes=limits["max_shared_mem"],
    )


@functools.cache
def target_of(device: torch.device) -> Target:
    """Return the key of launch configurations for a device; ``device`` has an index unless it is the CPU."""
    if device.type != "cuda":
        return _cpu_device.target
    return _target(device_properties(device))


def _target(properties: DeviceProperties) -> Target:
    return Target.of_gpu(properties.capability, properties.name, properties.amd)


def require_device(op: str, device: torch.device) -> None:
    """Check that the device of an op's operands can run the kernels and is the current device.

    Raise UnsupportedDeviceError for a device that is too old, ArgumentError if another device is current.
    """
    _require_capability(op, device)
    if device.type == "cuda" and (current := torch.cuda.current_device()) != device.index:
        raise ArgumentError(
            f"{op}: the operands are on {device} and the current device is cuda:{current}; "
            f"call torch.cuda.set_device({device.index}) first"
        )


@functools.cache
def require_fp8(op: str, device: torch.device, purpose: str = "a KV cache in float8_e4m3fn") -> None:
    """Raise UnsupportedDeviceError if the device cannot convert from and to float8 e4m3."""
    properties = device_properties(device)
    if not properties.amd:
        check_capability(op, properties, OLDEST_WITH_FP8, purpose)
    elif not target_of(device).converts_fp8:
        raise UnsupportedDeviceError(
            f"{op}: {properties.name} ({properties.amd}) cannot convert from and to float8_e4m3fn; gfx950 can"
        )


@functools.cache
def _require_capability(op: str, device: torch.device) -> None:
    properties = device_properties(device)
    if not properties.amd:
        check_capability(op, properties, OLDEST, "the Triton kernels")
    elif properties.amd not in AMD_ARCHITECTURES:
        raise UnsupportedDeviceError(
            f"{op}: {properties.name} has architecture {properties.amd}; the Triton kernels are compiled for "
            f"{', '.join(AMD_ARCHITECTURES)}"
        )


def check_capability(op: str, properties: DeviceProperties, oldest: tuple[int, int], purpose: str) -> None:
    if properties.capability < oldest:
        found, needed = (f"{major}.{minor}" for major, minor in (properties.capability, oldest))
        raise UnsupportedDeviceError(
            f"{op}: {properties.name} has compute capability {found}; {purpose} need{'s' * purpose.startswith('a ')} "
            f"{needed} or above"
        )
