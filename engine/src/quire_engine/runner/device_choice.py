"""The choice of the device that runs the model: a pure decision on what ``device_search`` found."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire_engine.config import DeviceName, DType
from quire_kernels.triton_runtime.target import AMD_ARCHITECTURES, Target

OLDEST = (8, 0)
"""The compute capability of Ampere, which the kernels require."""
OLDEST_WITH_FP8 = (8, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    index: int
    """The index among the GPUs that this process may see."""
    name: str
    capability: tuple[int, int]
    """The compute capability: major and minor. It means nothing for AMD's GPUs."""
    amd: str = ""
    """AMD's name of the architecture, such as gfx942; empty for NVIDIA's GPUs."""
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundDevices:
    torch_version: str
    architectures: tuple[str, ...]
    """The architectures that this torch supports, such as sm_90 or gfx942; empty if it is built for CPUs only."""
    hip: str | None = None
    """The version of HIP for which this torch is built; None for CUDA and CPUs."""
    visible: tuple[tuple[str, str], ...] = ()
    """The variables that select among GPUs and are set, with their values."""
    gpus: tuple[Gpu, ...]
    failure: str | None
    """The driver's error instead of a list of GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    gpu: Gpu
    others: tuple[Gpu, ...] = ()
    """More GPUs of the same kind, if several are needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCpu:
    reason: str
    """The reason why no GPU is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoDevice:
    """The error if the requested device is unavailable."""

    message: str


def choose_device(
    asked: DeviceName, find: Callable[[], FoundDevices], count: int = 1, *, needed_by: str = "the model"
) -> OnGpu | OnCpu | NoDevice:
    """Return the first ``count`` usable GPUs of one kind, if GPUs may be used. ``find`` is called only if needed.

    ``needed_by`` are the flags that need several, for messages.

    If there are some, but fewer, that is an error also for ``auto``: a CPU would be no substitute for them.
    """
    if asked == "cpu":
        return OnCpu(reason="--device cpu")
    found = find()
    if (mistaken := _other_platform(asked, found)) is not None:
        return NoDevice(message=mistaken)
    reason = _no_gpu(found)
    if reason is None:
        reasons = [_unfit(gpu, found) for gpu in found.gpus]
        usable = [gpu for gpu, unfit in zip(found.gpus, reasons, strict=True) if unfit is None]
        if usable:
            return _of_one_kind(usable, count, found, needed_by)
        reason = "; ".join(dict.fromkeys(unfit for unfit in reasons if unfit is not None))
    if asked == "auto":
        return OnCpu(reason=reason)
    install = "" if found.architectures else f": install torch's build for {'ROCm' if asked == 'rocm' else 'CUDA'}"
    return NoDevice(message=f"--device {asked}: {reason}{install}; --device cpu would run without")


def _other_platform(asked: DeviceName, found: FoundDevices) -> str | None:
    """Return why the requested platform is not the one for which this torch is built, or None."""
    if not found.architectures or asked == "auto":
        return None
    if asked == "cuda" and found.hip is not None:
        return f"--device cuda: torch {found.torch_version} is built for AMD (HIP {found.hip}): use --device rocm"
    if asked == "rocm" and found.hip is None:
        return (
            f"--device rocm: torch {found.torch_version} is built for NVIDIA (CUDA): use --device cuda, or"
            " install torch's build for ROCm"
        )
    return None


def _of_one_kind(usable: Sequence[Gpu], count: int, found: FoundDevices, needed_by: str) -> OnGpu | NoDevice:
    """Return GPUs like the first one that has enough others, because ranks wait for each other in every layer."""
    kinds: dict[tuple[str, tuple[int, int]], list[Gpu]] = {}
    for gpu in usable:
        kinds.setdefault((gpu.name, gpu.capability), []).append(gpu)
    for gpus in kinds.values():
        if len(gpus) >= count:
            return OnGpu(gpu=gpus[0], others=tuple(gpus[1:count]))
    seen = " and ".join(f"{len(gpus)} × {name}" for (name, _), gpus in kinds.items())
    most = max(len(gpus) for gpus in kinds.values())
    variables = ", ".join(f"{name} is {value!r}" for name, value in found.visible)
    visible = f" ({variables})" if variables else ""
    return NoDevice(
        message=f"{needed_by} needs {count} GPUs of one kind on this machine, and this process may use {seen}{visible}:"
        f" {'leave it out' if most == 1 else f'use at most {most} ranks on a machine'}, give the process more GPUs, or"
        " use --device cpu"
    )


def _no_gpu(found: FoundDevices) -> str | None:
    if not found.architectures:
        return f"torch {found.torch_version} is built without CUDA and without ROCm"
    for name, value in found.visible:
        if value.strip() in ("", "-1"):
            return f"{name} is {value.strip()!r}, which hides every GPU"
    if found.failure is not None:
        return f"torch {found.torch_version} cannot use a GPU here: {found.failure}"
    lister = "nvidia-smi" if found.hip is None else "rocm-smi"
    return None if found.gpus else f"there is no GPU that this process may see ({lister} lists those of the machine)"


def _unfit(gpu: Gpu, found: FoundDevices) -> str | None:
    if gpu.amd:
        return _unfit_amd(gpu, found)
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


def _unfit_amd(gpu: Gpu, found: FoundDevices) -> str | None:
    if gpu.amd not in AMD_ARCHITECTURES:
        return f"{gpu.name} has architecture {gpu.amd}, and the kernels are compiled for {', '.join(AMD_ARCHITECTURES)}"
    if gpu.amd not in found.architectures:
        return (
            f"{gpu.name} has architecture {gpu.amd}, and torch {found.torch_version} is built for"
            f" {', '.join(found.architectures)} only"
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
    if gpu.amd:
        if Target.named(gpu.amd).converts_fp8:
            return None
        return (
            f"--kv-cache-dtype fp8 needs a GPU that converts float8 e4m3fn (gfx950), and {gpu.name} ({gpu.amd})"
            " has another float8: use auto"
        )
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
    if gpu.amd:
        return (
            f"--quantization fp8 is for GPUs of NVIDIA in this version, and the model runs on {gpu.name}: leave it out"
        )
    if gpu.capability < OLDEST_WITH_FP8:
        return (
            f"--quantization fp8 needs compute capability {_version(OLDEST_WITH_FP8)} (Ada, Hopper), and {gpu.name}"
            f" has {_version(gpu.capability)}: leave it out"
        )
    if dtype not in ("auto", "bfloat16"):
        return f"--quantization fp8 computes activations in bfloat16, and --dtype is {dtype}: leave out one of the two"
    return None
