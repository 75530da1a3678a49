"""Conversions to float8 (e4m3) for all kernels, on devices and in Triton's interpreter."""

import triton
import triton.language as tl

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.fp8 import LARGEST, SMALLEST_MAGNITUDE

_INTERPRETED = tl.constexpr(INTERPRETED)
_LARGEST, _SMALLEST = tl.constexpr(LARGEST), tl.constexpr(SMALLEST_MAGNITUDE)


@triton.jit
def to_float8(x):
    """Return float32 up to ±448 as float8, rounded to nearest even; NaN stays NaN."""
    if _INTERPRETED:
        # The interpreter's own conversion loses carries, small numbers and NaN, so the bits are computed here.
        magnitude = tl.abs(x)
        bits = magnitude.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        small = (magnitude * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF
        code = tl.where(magnitude < 0.015625, small, normal)
        code = tl.where(x == x, code, 0x7F) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def row_factors(largest):
    """Return the factor and the scale of rows, by the largest magnitude of each; see ``quire_kernels.fp8``."""
    bounded = tl.maximum(largest, tl.full(largest.shape, _SMALLEST, tl.float32))
    whole = tl.full(largest.shape, _LARGEST, tl.float32)
    return tl.div_rn(whole, bounded), tl.div_rn(bounded, whole)
