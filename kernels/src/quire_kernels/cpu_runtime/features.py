"""What the CPU that workers are compiled for can do.

It is asked of numba, not of the machine: ``NUMBA_CPU_FEATURES`` has code compiled for another one, and numba keeps the
machine code of each apart.
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
    """Whether one instruction adds the products of two pairs of bfloat16 to a float32, in each of 16 lanes."""
    return "+avx512bf16" in _features() and has_avx512()


def multiplies_tiles() -> bool:
    """Return whether the target has AMX: products of whole tiles of bfloat16 and of bytes.

    The answer says what code is compiled. Whether a process may run that code, ``amx.may_use_tiles`` says.
    """
    return _features() >= _TILES and multiplies_bfloat16() and byte_products() == "avx512-vnni"


def byte_products() -> Literal["avx512-vnni", "avx-vnni", "avx2", "none"]:
    """By which instructions four products of an unsigned and a signed byte are added to an int32, in each lane."""
    if has_avx512() and "+avx512vnni" in _features():
        return "avx512-vnni"
    if "+avxvnni" in _features():
        return "avx-vnni"
    return "avx2" if "+avx2" in _features() else "none"
