"""The conversion of rows of a tile's sums into stored results, 32 columns at once, in vector instructions."""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.dot_tiles import PANEL
from quire_kernels.cpu_runtime.features import multiplies_tiles

_LANES = 16
_F32 = ir.FloatType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_FLOATS = ir.VectorType(_F32, _LANES)
_INTEGERS = ir.VectorType(_I32, _LANES)
_CONTRACT = ("contract",)


@intrinsic
def store_bytes_row(
    typingctx: Any, sums: Any, zero: Any, weight_sums: Any, scale: Any, weight_scales: Any, bias: Any, target: Any
) -> Any:
    """Compute target[c] = (sums[c] - zero * weight_sums[c]) * (scale * weight_scales[c]) + bias[c]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums_ptr, zero, weight_sums_ptr, scale, scales_ptr, bias_ptr, out = args
        zeros, scales = _splat(builder, zero, _INTEGERS), _splat(builder, scale, _FLOATS)
        for first in range(0, PANEL, _LANES):
            shift = builder.mul(zeros, _load(builder, weight_sums_ptr, first, _INTEGERS))
            whole = builder.sub(_load(builder, sums_ptr, first, _INTEGERS), shift)
            factor = builder.fmul(scales, _load(builder, scales_ptr, first, _FLOATS))
            product = builder.fmul(builder.sitofp(whole, _FLOATS), factor, flags=_CONTRACT)
            result = builder.fadd(product, _load(builder, bias_ptr, first, _FLOATS), flags=_CONTRACT)
            _store(builder, result, out, first, target.dtype)
        return context.get_dummy_value()

    return types.void(sums, types.int32, weight_sums, types.float32, weight_scales, bias, target), codegen


@intrinsic
def store_row(typingctx: Any, sums: Any, bias: Any, target: Any) -> Any:
    """Compute target[c] = sums[c] + bias[c]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums_ptr, bias_ptr, out = args
        for first in range(0, PANEL, _LANES):
            result = builder.fadd(_load(builder, sums_ptr, first, _FLOATS), _load(builder, bias_ptr, first, _FLOATS))
            _store(builder, result, out, first, target.dtype)
        return context.get_dummy_value()

    return types.void(sums, bias, target), codegen


@intrinsic
def store_rows(typingctx: Any, sums: Any, rows: Any, bias: Any, target: Any, stride: Any) -> Any:
    """Compute target[r, c] = sums[r, c] + bias[c] for some rows of 32 columns; ``stride`` in elements of the target."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums_ptr, count, bias_ptr, out, step = args
        biases = [_load(builder, bias_ptr, first, _FLOATS) for first in range(0, PANEL, _LANES)]
        with cgutils.for_range(builder, count) as loop:
            given = builder.gep(sums_ptr, [builder.mul(loop.index, ir.Constant(ir.IntType(64), PANEL))])
            place = builder.gep(out, [builder.mul(loop.index, step)])
            results = [
                builder.fadd(_load(builder, given, _LANES * half, _FLOATS), bias) for half, bias in enumerate(biases)
            ]
            if target.dtype == types.uint16 and multiplies_tiles():
                pairs = round_pairs(builder, results)
                builder.store(pairs, builder.bitcast(place, pairs.type.as_pointer()), align=2)
            else:
                for half, result in enumerate(results):
                    _store(builder, result, place, _LANES * half, target.dtype)
        return context.get_dummy_value()

    return types.void(sums, types.int64, bias, target, types.int64), codegen


def round_pairs(builder: Any, halves: list[Any]) -> Any:
    """Return 32 results in bfloat16, rounded by one instruction. Subnormal results become 0; NaN stays NaN."""
    kind = ir.FunctionType(ir.VectorType(_I16, PANEL), [_FLOATS, _FLOATS])
    convert = builder.module.declare_intrinsic("llvm.x86.avx512bf16.cvtne2ps2bf16.512", (), kind)
    return builder.call(convert, halves[::-1])


def _load(builder: Any, pointer: Any, first: int, kind: Any) -> Any:
    place = builder.gep(pointer, [ir.Constant(ir.IntType(64), first)])
    return builder.load(builder.bitcast(place, kind.as_pointer()), align=4)


def _splat(builder: Any, value: Any, kind: Any) -> Any:
    none = ir.Constant(kind, ir.Undefined)
    single = builder.insert_element(none, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, none, ir.Constant(_INTEGERS, [0] * _LANES))


def _store(builder: Any, vector: Any, pointer: Any, first: int, stored: Any) -> None:
    """Store ``vector`` rounded to the storage type: to nearest, ties to even; NaN stays NaN."""
    place = builder.gep(pointer, [ir.Constant(ir.IntType(64), first)])
    if stored == types.float32:
        rounded = vector
    elif stored == types.int16:
        rounded = builder.fptrunc(vector, ir.VectorType(ir.HalfType(), _LANES))
    else:
        bits = builder.bitcast(vector, _INTEGERS)
        odd = builder.and_(builder.lshr(bits, _lanes(16)), _lanes(1))
        up = builder.add(bits, builder.add(odd, _lanes(0x7FFF)))
        chosen = builder.select(builder.fcmp_unordered("uno", vector, vector), _lanes(0x7FC00000), up)
        rounded = builder.trunc(builder.lshr(chosen, _lanes(16)), ir.VectorType(_I16, _LANES))
    builder.store(rounded, builder.bitcast(place, rounded.type.as_pointer()), align=2)


def _lanes(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * _LANES)
