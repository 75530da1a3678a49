"""The selection of the module that runs an op: its ``cpu``, or its ``kernel`` in Triton.

Triton runs on CUDA devices. With ``TRITON_INTERPRET=1`` in the environment it interprets, and this process then runs
the kernels on CPU tensors too, so that all layers above can be tested without a GPU. Triton reads the variable when a
kernel is defined, so the choice is fixed when the process starts.
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
    """Return the module that implements ``op`` on the device.

    Raise UnsupportedDeviceError for other devices; a silent fallback would be slow without a visible reason.
    """
    if device_type not in ("cpu", "cuda"):
        raise UnsupportedDeviceError(f"{op}: no path for {device_type} devices; run the model on cuda or cpu")
    return importlib.import_module(f"quire_kernels.{op}.{'kernel' if runs_triton(device_type) else 'cpu'}")
