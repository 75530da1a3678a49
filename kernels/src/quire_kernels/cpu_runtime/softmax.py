"""The softmax over one row of scores, written as vector instructions.

It finds the largest score and computes the weights in the format of the micro kernel.

Each token's lane follows from its position in the row, whichever part of the row is visible. A sum therefore has the
same bits with more hidden tokens before or after it.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.cpu_runtime.micro_kernel import WIDTH, weighs_in_pairs

_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, WIDTH)
_INTEGERS = ir.VectorType(_I32, WIDTH)
_HALVES = ir.VectorType(ir.IntType(16), WIDTH)
_OCTET = ir.VectorType(_F32, 8)
_CONTRACT = ("contract",)
_LN_2 = math.log(2.0)
_LOG2_E = 1.0 / _LN_2
_UNSEEN = float("-inf")
_COMPARED = 4  # Strips of scores that are compared with each other.
_POWER_OF_2 = (0.013534168, 0.052011464, 0.24144275, 0.69300383, 1.0000026)
"""2 ** x for x from 0 to 1, the highest power first."""


@intrinsic
def largest_score(typingctx: Any, scores: Any, low: Any, high: Any) -> Any:
    """Return the largest of scores[low:high], given their address; NaN is ignored."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address, low, high = args
        cell = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_floats(_UNSEEN), cell)

        def load(index: Any) -> Any:
            return builder.load(_at(builder, address, index, _VECTOR), align=4)

        def body(index: Any, visible: Any | None) -> None:
            vector = load(index)
            if visible is not None:
                vector = builder.select(visible, vector, _floats(_UNSEEN))
            builder.store(_larger(builder, vector, builder.load(cell)), cell)

        def several(index: Any) -> None:
            """Compare strips with each other first: a comparison with ``cell`` waits for the one before."""
            found = [load(builder.add(index, _number(strip))) for strip in range(_COMPARED)]
            while len(found) > 1:
                found = [_larger(builder, *pair) for pair in zip(found[::2], found[1::2], strict=True)]
            builder.store(_larger(builder, found[0], builder.load(cell)), cell)

        _over_strips(builder, low, high, body, several)
        return _reduced(builder, builder.load(cell), _larger)

    return types.float32(types.int64, types.int64, types.int64), codegen


@intrinsic
def weigh_scores(
    typingctx: Any, block: Any, scores: Any, low: Any, high: Any, tokens: Any, scale: Any, largest: Any
) -> Any:
    """Turn scores[low:high] into weights exp(scale * score - largest), in place, and return their sum.

    The other weights up to ``tokens`` become 0. If values are multiplied in pairs, the weights are bfloat16 and fill
    the first half of the row; the sum is over the rounded weights.
    """
    pairs: type[_PairsOut] = _ShortPairsOut if multiplies_tiles() else _PairsOut
    kind = pairs if weighs_in_pairs(block.dtype) else _FloatsOut

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _, address, low, high, tokens, scale, largest = args
        exponential = kind(builder, scale, largest)

        def zero(begin: Any, end: Any) -> None:
            with cgutils.for_range_slice(builder, begin, end, _number(1), _I64) as (index, _):
                exponential.store(address, index, _floats(0.0))

        def body(index: Any, visible: Any | None) -> None:
            """Compute the weights of one strip. Writes stay behind the reads, so the row can be processed in place."""
            weight = exponential.of(builder.load(_at(builder, address, index, _VECTOR), align=4))
            if visible is not None:
                weight = builder.select(visible, weight, _floats(0.0))
            exponential.store(address, index, weight)

        first, last = _strips(builder, low, high)
        zero(_number(0), first)
        _over_strips(builder, low, high, body)
        zero(last, _strips(builder, low, tokens)[1])
        return exponential.total()

    i64 = types.int64
    return types.float32(block, i64, i64, i64, i64, types.float32, types.float32), codegen


class _FloatsOut:
    """Weights as float32, to 2 units in the last place: ``scalars.exp_float32``, except that NaN stays NaN."""

    def __init__(self, builder: Any, scale: Any, largest: Any) -> None:
        self._builder = builder
        self._scale = _splat(builder, scale)
        self._top = _splat(builder, largest)
        self._sums = cgutils.alloca_once(builder, _VECTOR)
        builder.store(_floats(0.0), self._sums)

    def of(self, score: Any) -> Any:
        builder = self._builder
        x = builder.fsub(builder.fmul(score, self._scale), self._top)
        is_zero = builder.fcmp_ordered("<", x, _floats(-87.3))
        clamped = builder.select(is_zero, _floats(-87.3), x)
        n = _nearest(builder, builder.fmul(clamped, _floats(1.4426950408889634)))
        # ln 2 is split into two parts, so that n * ln 2 is exact.
        r = _fused(builder, n, _floats(2.12194440e-4), _fused(builder, n, _floats(-0.693359375), clamped))
        series = _floats(1.0 / 5040.0)
        for term in (1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0):
            series = _fused(builder, series, r, _floats(term))
        exponent = builder.shl(builder.fptosi(n, _INTEGERS), _integers(23))
        # e ** r is between 0.7 and 1.5, so adding n to its exponent multiplies by 2 ** n.
        value = builder.bitcast(builder.add(builder.bitcast(series, _INTEGERS), exponent), _VECTOR)
        return builder.select(is_zero, _floats(0.0), value)

    def store(self, address: Any, index: Any, weight: Any) -> None:
        builder = self._builder
        builder.store(weight, _at(builder, address, index, _VECTOR), align=4)
        builder.store(builder.fadd(builder.load(self._sums), weight), self._sums)

    def total(self) -> Any:
        return _reduced(self._builder, self._builder.load(self._sums), lambda builder, a, b: builder.fadd(a, b))


class _PairsOut:
    """Weights as bfloat16, for CPUs with AVX-512: 2 ** (x log2 e).

    The fraction's power is its Taylor series to degree 5; its error is 3e-6, and half a unit of bfloat16 is 2e-3.
    """

    def __init__(self, builder: Any, scale: Any, largest: Any) -> None:
        self._builder = builder
        self._scale = _splat(builder, builder.fmul(scale, ir.Constant(_F32, _LOG2_E)))
        self._top = _splat(builder, builder.fmul(largest, ir.Constant(_F32, -_LOG2_E)))
        self._sums = cgutils.alloca_once(builder, _OCTET)
        builder.store(ir.Constant(_OCTET, [0.0] * 8), self._sums)

    def of(self, score: Any) -> Any:
        builder = self._builder
        x = _fused(builder, score, self._scale, self._top)
        x = builder.select(builder.fcmp_ordered("<", x, _floats(-200.0)), _floats(-200.0), x)  # -inf has no fraction
        n = _nearest(builder, x)
        r = builder.fsub(x, n)
        series = _floats(_LN_2**5 / 120.0)
        for term in (_LN_2**4 / 24.0, _LN_2**3 / 6.0, _LN_2**2 / 2.0, _LN_2, 1.0):
            series = _fused(builder, series, r, _floats(term))
        return _scaled(builder, series, n)

    def store(self, address: Any, index: Any, weight: Any) -> None:
        builder = self._builder
        bits = builder.bitcast(weight, _INTEGERS)
        odd = builder.and_(builder.lshr(bits, _integers(16)), _integers(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _integers(0x7FFF))), _integers(16))
        self._keep(builder.trunc(rounded, _HALVES), address, index)

    def _keep(self, halves: Any, address: Any, index: Any) -> None:
        builder = self._builder
        builder.store(halves, _at(builder, address, index, _HALVES), align=2)
        pairs = ir.VectorType(_I32, 8)
        kind = ir.FunctionType(_OCTET, [_OCTET, pairs, pairs])
        product = builder.module.declare_intrinsic("llvm.x86.avx512bf16.dpbf16ps.256", (), kind)
        ones = ir.Constant(pairs, [0x3F803F80] * 8)
        summed = self._add(lambda sums: builder.call(product, [sums, builder.bitcast(halves, pairs), ones]))
        builder.store(summed, self._sums)

    def _add(self, to: Callable[[Any], Any]) -> Any:
        """Return the sums with a strip's weights, given a function that adds the weights to sums."""
        return to(self._builder.load(self._sums))

    def total(self) -> Any:
        return _reduced(self._builder, self._builder.load(self._sums), lambda builder, a, b: builder.fadd(a, b))


class _ShortPairsOut(_PairsOut):
    """The same by half as many instructions, because next to products of tiles the softmax takes most of the time.

    One instruction finds the fraction above the next lower integer, another scales by that integer's power and accepts
    -inf, and a third rounds. The polynomial of degree 4 has a relative error of 3e-6.
    """

    def of(self, score: Any) -> Any:
        builder = self._builder
        x = _fused(builder, score, self._scale, self._top)
        kind = ir.FunctionType(_VECTOR, [_VECTOR, _I32, _VECTOR, ir.IntType(16), _I32])
        reduce = builder.module.declare_intrinsic("llvm.x86.avx512.mask.reduce.ps.512", (), kind)
        all_lanes, as_set, downwards = ir.Constant(ir.IntType(16), 0xFFFF), ir.Constant(_I32, 4), ir.Constant(_I32, 1)
        r = builder.call(reduce, [x, downwards, x, all_lanes, as_set])
        series = _floats(_POWER_OF_2[0])
        for term in _POWER_OF_2[1:]:
            series = _fused(builder, series, r, _floats(term))
        return _scaled(builder, series, x)

    def store(self, address: Any, index: Any, weight: Any) -> None:
        builder = self._builder
        convert = builder.module.declare_intrinsic(
            "llvm.x86.avx512bf16.cvtneps2bf16.512", (), ir.FunctionType(_HALVES, [_VECTOR])
        )
        self._keep(builder.call(convert, [weight]), address, index)

    def _add(self, to: Callable[[Any], Any]) -> Any:
        """Add the pairs first, because only an addition of floats is fast enough to wait for the strip before."""
        builder = self._builder
        return builder.fadd(builder.load(self._sums), to(ir.Constant(_OCTET, [0.0] * 8)))


def _scaled(builder: Any, value: Any, exponent: Any) -> Any:
    """Return value * 2 ** floor(exponent) by one instruction."""
    kind = ir.FunctionType(_VECTOR, [_VECTOR, _VECTOR, _VECTOR, ir.IntType(16), _I32])
    scale = builder.module.declare_intrinsic("llvm.x86.avx512.mask.scalef.ps.512", (), kind)
    all_lanes, as_set = ir.Constant(ir.IntType(16), 0xFFFF), ir.Constant(_I32, 4)
    return builder.call(scale, [value, exponent, value, all_lanes, as_set])


def _fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fadd(builder.fmul(a, b, flags=_CONTRACT), c, flags=_CONTRACT)


def _nearest(builder: Any, x: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR])
    return builder.call(builder.module.declare_intrinsic("llvm.rint.v16f32", (), kind), [x])


def _over_strips(
    builder: Any,
    low: Any,
    high: Any,
    body: Callable[[Any, Any | None], None],
    several: Callable[[Any], None] | None = None,
) -> None:
    """Call ``body(strip, visible lanes)`` for each strip of low:high; None means all lanes.

    Call ``several(strip)`` instead for each ``_COMPARED`` whole strips, if it is given.
    """
    first, last = _strips(builder, low, high)
    whole_from = builder.udiv(builder.add(low, _number(WIDTH - 1)), _number(WIDTH))
    whole_to = builder.udiv(high, _number(WIDTH))

    def smaller(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed("<", a, b), a, b)

    def larger(a: Any, b: Any) -> Any:
        return builder.select(builder.icmp_signed(">", a, b), a, b)

    begin_whole = whole_from
    if several is not None:
        count = builder.sdiv(larger(builder.sub(whole_to, whole_from), _number(0)), _number(_COMPARED))
        with cgutils.for_range(builder, count) as loop:
            several(builder.add(whole_from, builder.mul(loop.index, _number(_COMPARED))))
        begin_whole = builder.add(whole_from, builder.mul(count, _number(_COMPARED)))
    for begin, end, is_whole in (
        (first, smaller(whole_from, last), False),
        (begin_whole, whole_to, True),
        (larger(whole_from, whole_to), last, False),
    ):
        with cgutils.for_range_slice(builder, begin, end, _number(1), _I64) as (index, _):
            body(index, None if is_whole else _visible(builder, index, low, high))


def _visible(builder: Any, index: Any, low: Any, high: Any) -> Any:
    """Return the lanes of a strip that are in low:high, as a vector of bits."""
    begin = builder.mul(index, _number(WIDTH))
    lanes = ir.Constant(_INTEGERS, list(range(WIDTH)))
    # One unsigned comparison tests both bounds.
    from_low = builder.add(lanes, _splat(builder, builder.trunc(builder.sub(begin, low), _I32)))
    return builder.icmp_unsigned("<", from_low, _splat(builder, builder.trunc(builder.sub(high, low), _I32)))


def _strips(builder: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Return the index of the first strip of low:high and of the strip after the last one."""
    last = builder.add(high, _number(WIDTH - 1))
    return builder.udiv(low, _number(WIDTH)), builder.udiv(last, _number(WIDTH))


def _larger(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _reduced(builder: Any, vector: Any, combine: Callable[[Any, Any, Any], Any]) -> Any:
    """Return one number from all lanes, combined by halving."""
    width = vector.type.count
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
