"""Features of the CPU for which workers are compiled.

The source is numba's target, not the machine: ``NUMBA_CPU_FEATURES`` may select another CPU, and numba caches the
machine code of each CPU separately.
"""

import functools
from typing import Literal

from numba.core.registry import cpu_target

_TILES = frozenset({"+amx-tile", "+amx-bf16", "+amx-int8"})


@functools.cache
def _features() -> frozenset[str]:
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(features.split(","))


def has_avx512() -> bool:
    return "+avx512f" in _features()


def multiplies_bfloat16() -> bool:
    """Return whether one instruction adds two products of bfloat16 pairs to a float32 in each of 16 lanes."""
    return "+avx512bf16" in _features() and has_avx512()


@functools.cache
def multiplies_tiles() -> bool:
    """Return whether the target has AMX: products of whole tiles of bfloat16 and of bytes.

    This decides which code is compiled. ``amx.may_use_tiles`` decides whether the process may run it.
    """
    return _features() >= _TILES and multiplies_bfloat16() and byte_products() == "avx512-vnni"


def byte_products() -> Literal["avx512-vnni", "avx-vnni", "avx2", "none"]:
    """Return the instructions that add four products of an unsigned and a signed byte to an int32 in each lane."""
    if has_avx512() and "+avx512vnni" in _features():
        return "avx512-vnni"
    if "+avxvnni" in _features():
        return "avx-vnni"
    return "avx2" if "+avx2" in _features() else "none"
