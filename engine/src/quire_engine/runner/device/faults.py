"""What the GPU complains of, told as an error for people: it names what would help, or where to look."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quire_engine.errors import DeviceError

FULL_IN_STEP = "lower --gpu-memory-utilization, so that the KV cache leaves more, or --max-num-batched-tokens"
_SIGNS = ("CUDA error", "Triton Error [CUDA]", "CUBLAS_STATUS", "cuBLAS")


@contextmanager
def device_faults(doing: str, *, when_full: str) -> Iterator[None]:
    """Turns what CUDA raises into DeviceError. ``doing`` is the work, ``when_full`` what to change if memory ran out.

    After any other fault nothing that lies on the device can be trusted, nor will CUDA do anything more for this
    process: it has to end.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise DeviceError(f"the GPU ran out of memory while {doing}: {when_full} ({_first_line(error)})") from error
    except RuntimeError as error:
        if not _is_fault(error):
            raise
        raise DeviceError(
            f"the GPU failed while {doing}: {_first_line(error)}. The work that failed may have been issued a step"
            " earlier; CUDA_LAUNCH_BLOCKING=1 finds the launch, QUIRE_KERNELS_CHECK=1 has kernels check their inputs"
        ) from error


def _is_fault(error: RuntimeError) -> bool:
    fault: type[Exception] | None = getattr(torch, "AcceleratorError", None)
    return (fault is not None and isinstance(error, fault)) or any(sign in str(error) for sign in _SIGNS)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
