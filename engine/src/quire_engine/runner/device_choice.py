"""The choice of the device that runs the model: a pure decision on what ``device_search`` found."""

from collections.abc import Callable
from dataclasses import dataclass

from quire_engine.config import DeviceName, DType

OLDEST = (8, 0)
"""The compute capability of Ampere, which the kernels require."""
OLDEST_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    """The index among the GPUs that this process may see."""
    name: str
    capability: tuple[int, int]
    """The compute capability: major and minor."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    torch_version: str
    architectures: tuple[str, ...]
    """The architectures that this torch supports, such as sm_90; empty if it is built without CUDA."""
    visible: str | None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""
    gpus: tuple[Gpu, ...]
    failure: str | None
    """The driver's error instead of a list of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    gpu: Gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCpu:
    reason: str
    """The reason why no GPU is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDevice:
    """The error if the requested device is unavailable."""

    message: str


def choose_device(asked: DeviceName, find: Callable[[], FoundDevices]) -> OnGpu | OnCpu | NoDevice:
    """Return the first usable GPU, if one may be used. ``find`` is called only if needed."""
    if asked == "cpu":
        return OnCpu(reason="--device cpu")
    found = find()
    reason = _no_gpu(found)
    if reason is None:
        reasons = [_unfit(gpu, found) for gpu in found.gpus]
        for gpu, unfit in zip(found.gpus, reasons, strict=True):
            if unfit is None:
                return OnGpu(gpu=gpu)
        reason = "; ".join(dict.fromkeys(unfit for unfit in reasons if unfit is not None))
    if asked == "auto":
        return OnCpu(reason=reason)
    return NoDevice(message=f"--device cuda: {reason}; --device cpu would run without")


def _no_gpu(found: FoundDevices) -> str | None:
    if not found.architectures:
        return f"torch {found.torch_version} is built without CUDA"
    if found.visible is not None and found.visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES is {found.visible.strip()!r}, which hides every GPU"
    if found.failure is not None:
        return f"torch {found.torch_version} cannot use a GPU here: {found.failure}"
    return None if found.gpus else "there is no GPU that this process may see (nvidia-smi lists those of the machine)"


def _unfit(gpu: Gpu, found: FoundDevices) -> str | None:
    if gpu.capability < OLDEST:
        return (
            f"{gpu.name} has compute capability {_version(gpu.capability)}, and at least"
            f" {_version(OLDEST)} (Ampere, such as an A100 or A10) is needed"
        )
    if not any(_runs(architecture, gpu.capability) for architecture in found.architectures):
        return (
            f"{gpu.name} has compute capability {_version(gpu.capability)}, and torch {found.torch_version} is built"
            f" for {', '.join(found.architectures)} only"
        )
    return None


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Return whether code for an architecture runs here: on the same major number, if it is not older."""
    digits = architecture.removeprefix("sm_").rstrip("af")
    return digits.isdigit() and int(digits) // 10 == capability[0] and int(digits) % 10 <= capability[1]


def _version(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def kv_dtype_problem(gpu: Gpu | None) -> str | None:
    """Return why ``--kv-cache-dtype fp8`` is not possible, or None."""
    if gpu is None:
        return "--kv-cache-dtype fp8 needs a GPU, and this engine runs on the CPU: use auto"
    if gpu.capability < OLDEST_WITH_FP8:
        return (
            f"--kv-cache-dtype fp8 needs compute capability {_version(OLDEST_WITH_FP8)} (Ada, Hopper), and {gpu.name}"
            f" has {_version(gpu.capability)}: use auto"
        )
    return None


def fp8_weights_problem(gpu: Gpu | None, dtype: DType) -> str | None:
    """Return why ``--quantization fp8`` is not possible, or None."""
    if gpu is None:
        return "--quantization fp8 needs a GPU, and this engine runs on the CPU: use int8"
    if gpu.capability < OLDEST_WITH_FP8:
        return (
            f"--quantization fp8 needs compute capability {_version(OLDEST_WITH_FP8)} (Ada, Hopper), and {gpu.name}"
            f" has {_version(gpu.capability)}: leave it out"
        )
    if dtype not in ("auto", "bfloat16"):
        return f"--quantization fp8 computes activations in bfloat16, and --dtype is {dtype}: leave out one of the two"
    return None
