"""The softmax over one row of scores, written as vector instructions: its largest score, and the weights by which
values are multiplied next, as the micro kernel wants them.

Lanes lie over tokens by their place in the row, whatever part of it is visible: a sum has the same bits with more
hidden tokens before or behind.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.micro_kernel import WIDTH, weighs_in_pairs

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
_CONTRACT = ("contract",)
_UNSEEN = float("-inf")


@intrinsic
def largest_score(typingctx: Any, scores: Any, low: Any, high: Any) -> Any:
    """The largest of scores[low:high], at an address; NaN is passed over."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, low, high = args
        cell = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_floats(_UNSEEN), cell)
        first, last = _strips(builder, low, high)
        with cgutils.for_range_slice(builder, first, last, _number(1), _I64) as (index, _):
            visible = _visible(builder, index, low, high)
            vector = builder.select(
                visible, builder.load(_at(builder, address, index, _VECTOR), align=4), _floats(_UNSEEN)
            )
            builder.store(_larger(builder, vector, builder.load(cell)), cell)
        return _reduced(builder, builder.load(cell), _larger)

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def weigh_scores(typingctx: Any, block: Any, scores: Any, low: Any, high: Any, tokens: Any, largest: Any) -> Any:
    """Makes weights exp(score - largest) of scores[low:high], 0 of the rest up to ``tokens``, in place; their sum.

    Where values are multiplied in pairs, the weights are bfloat16 and fill the first half of the row; the sum is of
    them as they were rounded.
    """
    pairs = weighs_in_pairs(block.dtype)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, low, high, tokens, largest = args
        cell = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_floats(0.0), cell)
        top = _splat(builder, largest)

        def store(index: Any, vector: Any) -> None:
            """Writes no further than has been read, so a row may be weighed in place."""
            if pairs:
                halves = builder.trunc(builder.lshr(builder.bitcast(vector, _INTEGERS), _integers(16)), _HALVES)
                builder.store(halves, _at(builder, address, index, _HALVES), align=2)
            else:
                builder.store(vector, _at(builder, address, index, _VECTOR), align=4)

        def zero(begin: Any, end: Any) -> None:
            with cgutils.for_range_slice(builder, begin, end, _number(1), _I64) as (index, _):
                store(index, _floats(0.0))

        first, last = _strips(builder, low, high)
        _, end = _strips(builder, low, tokens)
        zero(_number(0), first)
        with cgutils.for_range_slice(builder, first, last, _number(1), _I64) as (index, _):
            score = builder.load(_at(builder, address, index, _VECTOR), align=4)
            weight = _exp(builder, builder.fsub(score, top))
            weight = builder.select(_visible(builder, index, low, high), weight, _floats(0.0))
            if pairs:
                weight = _rounded(builder, weight)
            builder.store(builder.fadd(builder.load(cell), weight), cell)
            store(index, weight)
        zero(last, end)
        return _reduced(builder, builder.load(cell), lambda builder, a, b: builder.fadd(a, b))

    i64 = types.int64
    return types.float32(block, i64, i64, i64, i64, types.float32), codegen


def _exp(builder: Any, x: Any) -> Any:
    """e ** x of x <= 0, to 2 units in the last place: as ``scalars.exp_float32``, but a NaN stays one."""
    clamped = builder.select(builder.fcmp_ordered("<", x, _floats(-87.3)), _floats(-87.3), x)

    def fused(a: Any, b: Any, c: Any) -> Any:
        return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)

    nearest = builder.module.declare_intrinsic("llvm.rint.v16f32", (), ir.FunctionType(_VECTOR, [_VECTOR]))
    n = builder.call(nearest, [builder.fmul(clamped, _floats(1.4426950408889634))])
    # ln 2 in two parts, so that n * ln 2 is exact.
    r = fused(n, _floats(2.12194440e-4), fused(n, _floats(-0.693359375), clamped))
    series = _floats(1.0 / 5040.0)
    for term in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
        series = fused(series, r, _floats(term))
    exponent = builder.shl(builder.fptosi(n, _INTEGERS), _integers(23))
    # e ** r is between 0.7 and 1.5, so adding n to its exponent multiplies by 2 ** n.
    value = builder.bitcast(builder.add(builder.bitcast(series, _INTEGERS), exponent), _VECTOR)
    return builder.select(builder.fcmp_ordered("<", x, _floats(-87.3)), _floats(0.0), value)


def _rounded(builder: Any, weight: Any) -> Any:
    """To the nearest bfloat16, ties to even."""
    bits = builder.bitcast(weight, _INTEGERS)
    odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
    raised = builder.add(bits, builder.add(odd, _integers(0x7FFF)))
    return builder.bitcast(builder.and_(raised, _integers(0xFFFF0000)), _VECTOR)


def _visible(builder: Any, index: Any, low: Any, high: Any) -> Any:
    """Which lanes of a strip are in low:high, as vector of bits."""
    begin = builder.mul(index, _number(WIDTH))
    lanes = ir.Constant(_INTEGERS, list(range(WIDTH)))
    # Unsigned, one comparison stands for both.
    from_low = builder.add(lanes, _splat(builder, builder.trunc(builder.sub(begin, low), _I32)))
    return builder.icmp_unsigned("<", from_low, _splat(builder, builder.trunc(builder.sub(high, low), _I32)))


def _strips(builder: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """The first strip of low:high and the one behind its last."""
    last = builder.add(high, _number(WIDTH - 1))
    return builder.udiv(low, _number(WIDTH)), builder.udiv(last, _number(WIDTH))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduced(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """One number of all lanes, combined in halves."""
    width = WIDTH
    while width > 1:
        width //= 2
        undefined = ir.Constant(vector.type, ir.Undefined)
        mask = ir.VectorType(_I32, width)
        lower = builder.shuffle_vector(vector, undefined, ir.Constant(mask, list(range(width))))
        upper = builder.shuffle_vector(vector, undefined, ir.Constant(mask, list(range(width, 2 * width))))
        vector = combine(builder, lower, upper)
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _floats(value: float) -> Any:
    return ir.Constant(_VECTOR, [value] * WIDTH)


def _integers(value: int) -> Any:
    return ir.Constant(_INTEGERS, [value] * WIDTH)


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, WIDTH), ir.Undefined)
    single = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(single, undefined, ir.Constant(_INTEGERS, [0] * WIDTH))


def _at(builder: Any, address: Any, index: Any, kind: Any) -> Any:
    size = WIDTH * (2 if kind == _HALVES else 4)
    return builder.inttoptr(builder.add(address, builder.mul(index, _number(size))), kind.as_pointer())
