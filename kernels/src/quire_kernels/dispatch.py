"""Which module runs an op: its ``cpu``, or its ``kernel`` in Triton.

Triton runs on CUDA devices; with ``TRITON_INTERPRET=1`` in the environment it interprets, and then this process runs
the kernels on CPU tensors too, so that everything above them can be tried without a GPU. Triton reads the variable as a
kernel is defined, so a process is one or the other from its start.
"""

import functools
import importlib
import os
from types import ModuleType

from quire_kernels.errors import UnsupportedDeviceError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def runs_triton(device_type: str) -> bool:
    return device_type == "cuda" or (INTERPRETED and device_type == "cpu")


@functools.cache
def implementation(op: str, device_type: str) -> ModuleType:
    """Raises UnsupportedDeviceError: no silent detour over another device, which would be slow for no stated reason."""
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedDeviceError(f"{op}: no path for {device_type} devices; run the model on cuda or cpu")
    return importlib.import_module(f"quire_kernels.{op}.{'kernel' if runs_triton(device_type) else 'cpu'}")
