"""In which floating-point type a model is computed.

On a CPU that is known from its features, because a wrong guess costs a factor of 400. Every GPU that is served from
multiplies both 16-bit types fast, and there the checkpoint decides.
"""

import logging
from pathlib import Path

import torch

from quire_engine.config import DType

_log = logging.getLogger(__name__)
_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16"})
_BY_NAME = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_dtype(option: DType, features: frozenset[str]) -> torch.dtype:
    """``auto`` is bfloat16 where the CPU multiplies it in hardware, else float32, whatever the checkpoint holds."""
    fast_bfloat16 = bool(features & _BFLOAT16_FEATURES)
    if option == "auto":
        return torch.bfloat16 if fast_bfloat16 else torch.float32
    if option == "float16" or (option == "bfloat16" and not fast_bfloat16):
        _log.warning("this CPU has no fast %s arithmetic; expect --dtype float32 to be many times faster", option)
    return _BY_NAME[option]


def resolve_gpu_dtype(option: DType, stored: str | None) -> torch.dtype:
    """``auto`` is the 16-bit type that the checkpoint is stored in; bfloat16 where that is another, or not known."""
    if option == "auto":
        return torch.float16 if stored == "float16" else torch.bfloat16
    return _BY_NAME[option]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The feature flags of the first CPU; none where the system does not list them."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(flags.partition(":")[2].split())
