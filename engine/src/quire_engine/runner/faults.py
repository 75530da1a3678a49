"""The errors of the GPU as messages for people, with a remedy or the place to look."""

from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import CalledProcessError

import torch

from quire_engine.errors import DeviceError

FULL_IN_STEP = "lower --gpu-memory-utilization, so that the KV cache leaves more, or --max-num-batched-tokens"
_SIGNS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuBLAS")
_SIGNS_OF_HIP = ("HIP error", "Triton Error [HIP]", "HIPBLAS_STATUS", "hipBLAS", "HSA_STATUS")


@contextmanager
def device_faults(doing: str, *, when_full: str) -> Iterator[None]:
    """Turn exceptions of CUDA, and of Triton when it builds a kernel, into DeviceError: see ``raise_fault``."""
    try:
        yield
    except Exception as error:
        raise_fault(error, doing, when_full=when_full)
        raise


def raise_fault(error: Exception, doing: str, *, when_full: str) -> None:
    """Raise DeviceError if ``error`` is one of CUDA, or of Triton when it builds a kernel.

    ``doing`` is the work, ``when_full`` the advice if memory ran out. After any other error, data on the device is
    unreliable and CUDA does no more work for this process: it has to end.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise DeviceError(f"the GPU ran out of memory while {doing}: {when_full} ({_first_line(error)})") from error
    if (reason := _why_not_built(error)) is not None:
        raise DeviceError(f"Triton could not build a kernel while {doing}: {reason}") from error
    if not _is_fault(error):
        return
    variable = "CUDA_LAUNCH_BLOCKING=1" if torch.version.hip is None else "AMD_SERIALIZE_KERNEL=3"
    raise DeviceError(
        f"the GPU failed while {doing}: {_first_line(error)}. The work that failed may have been issued a step"
        f" earlier; {variable} finds the launch, QUIRE_KERNELS_CHECK=1 has kernels check their inputs"
    ) from error


def _why_not_built(error: Exception) -> str | None:
    """Return why Triton could not build a kernel, or None for other errors.

    Triton compiles for the GPU itself, but uses a C compiler for the launcher.
    """
    if isinstance(error, RuntimeError) and "Failed to find C compiler" in str(error):
        return "there is no C compiler: install gcc and the C library's headers, or name one by CC"
    if isinstance(error, CalledProcessError):
        command = error.cmd if isinstance(error.cmd, str) else " ".join(map(str, error.cmd))
        return f"the C compiler failed, which needs the headers of Python and of the C library ({command})"
    # By name, because a machine without a GPU may have no Triton.
    kind = type(error)
    if kind.__module__ == "triton.runtime.errors" and kind.__name__ in ("OutOfResources", "PTXASError"):
        return f"{_first_line(error)}. QUIRE_KERNEL_CONFIGS names a folder with smaller blocks for this GPU"
    return None


def _is_fault(error: Exception) -> bool:
    fault: type[Exception] | None = getattr(torch, "AcceleratorError", None)
    if fault is not None and isinstance(error, fault):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS + _SIGNS_OF_HIP)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
