"""Scalar building blocks of the numba workers: storage types, bit casts, atomics, a vectorizable exponential.

numba has no bfloat16 and supports float16 only partially. Storage is therefore accessed through integer views of the
same bits: ``float32`` as itself, bfloat16 as ``uint16``, float16 as ``int16`` (the sign distinguishes the two).
Arithmetic is in float32.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Re-association lets LLVM vectorize sums. NaN and infinity keep their meaning: a masked score is -inf.
FAST: Any = {"reassoc", "contract", "nsz", "arcp"}

_F32 = ir.FloatType()
_F16 = ir.HalfType()
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()


@intrinsic
def to_float32(typingctx: Any, stored: Any) -> Any:
    """Return the value of one stored element; its storage type selects the conversion."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (bits,) = args
        if stored == types.float32:
            return bits
        if stored == types.uint16:
            return builder.bitcast(builder.shl(builder.zext(bits, _I32), ir.Constant(_I32, 16)), _F32)
        return builder.fpext(builder.bitcast(bits, _F16), _F32)

    return types.float32(stored), codegen


@intrinsic
def to_storage(typingctx: Any, value: Any, like: Any) -> Any:
    """Return ``value`` rounded to the storage type of ``like``: to nearest, ties to even; NaN stays NaN."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = args[0]
        if like == types.float32:
            return number
        if like == types.int16:
            return builder.bitcast(builder.fptrunc(number, _F16), _I16)
        bits = builder.bitcast(number, _I32)
        odd = builder.and_(builder.lshr(bits, ir.Constant(_I32, 16)), ir.Constant(_I32, 1))
        rounded = builder.add(bits, builder.add(odd, ir.Constant(_I32, 0x7FFF)))
        is_nan = builder.fcmp_unordered("uno", number, number)
        chosen = builder.select(is_nan, ir.Constant(_I32, 0x7FC00000), rounded)
        return builder.trunc(builder.lshr(chosen, ir.Constant(_I32, 16)), _I16)

    return like(types.float32, like), codegen


@intrinsic
def storage_pointer(typingctx: Any, block: Any, address: Any) -> Any:
    """Return ``address`` as a pointer to storage, typed by ``block``, the worker's argument."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[1], context.get_value_type(block))

    return block(block, types.int64), codegen


def _pointer_maker(element: Any) -> Any:
    @intrinsic
    def pointer(typingctx: Any, address: Any) -> Any:
        kind = types.CPointer(element)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.int64), codegen

    return pointer


float32_pointer = _pointer_maker(types.float32)
int32_pointer = _pointer_maker(types.int32)
uint8_pointer = _pointer_maker(types.uint8)
int64_pointer = _pointer_maker(types.int64)


@intrinsic
def as_int64_pointer(typingctx: Any, block: Any) -> Any:
    """Return the argument block as a pointer to its ``int64`` content, whatever type its pointer has."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.PointerType(_I64))

    return types.CPointer(types.int64)(block), codegen


@intrinsic
def fetch_add(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Add one to ``pointer[index]`` atomically and return the previous value.

    The operation has acquire-release order: a thread that sees the last count also sees all writes that other threads
    made before they counted.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place = builder.gep(args[0], [args[1]])
        return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@intrinsic
def _counted(typingctx: Any, pointer: Any, index: Any) -> Any:
    """Return ``pointer[index]`` with acquire order, so that writes before the counted increments are visible."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.gep(args[0], [args[1]]), "acquire", 8)

    return types.int64(types.CPointer(types.int64), types.int64), codegen


@njit
def await_count(pointer: Any, index: Any, count: Any) -> None:
    """Wait until ``pointer[index]``, which other threads increment by ``fetch_add``, reaches ``count``.

    The function spins, so it is only for waits of microseconds on work that has already started.
    """
    while _counted(pointer, index) < count:
        pass


def prefetch_at(builder: Any, place: Any, *, nearest: bool = True) -> None:
    """Emit a prefetch of the line at a pointer to bytes, into the nearest cache or into the second-level one."""
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
    read, level, data = (ir.Constant(_I32, number) for number in (0, 3 if nearest else 2, 1))
    builder.call(function, [place, read, level, data])


@intrinsic
def _prefetch_line(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_at(builder, builder.inttoptr(args[0], _BYTES))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@njit
def prefetch(address: Any, size: Any) -> None:
    """Prefetch ``size`` bytes that will soon be read, without waiting for them."""
    for line in range(address, address + size, 64):
        _prefetch_line(line)


@intrinsic
def copy_bytes(typingctx: Any, target: Any, source: Any, size: Any) -> Any:
    """Copy bytes between two addresses with C's memcpy; a Python loop compiles to slower code for rows of kilobytes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        function = builder.module.declare_intrinsic("llvm.memcpy", [_BYTES, _BYTES, _I64])
        places = [builder.inttoptr(address, _BYTES) for address in args[:2]]
        builder.call(function, [*places, args[2], ir.Constant(ir.IntType(1), 0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic
def float_from_bits(typingctx: Any, bits: Any) -> Any:
    """Return the float64 whose bits an ``int64`` of the argument block contains."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.DoubleType())

    return types.float64(types.int64), codegen


@intrinsic
def bits_of_float32(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _I32)

    return types.uint32(types.float32), codegen


@intrinsic
def _float32_of_bits(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _F32)

    return types.float32(types.int32), codegen


@njit(inline="always")
def ordered_bits(value: Any) -> Any:
    """Return an int32 for each float32, in the same order (-0 before 0, NaN at the ends).

    Vector instructions find the maximum of many int32, but not of many floats.
    """
    bits = np.int32(bits_of_float32(value))
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@njit(inline="always")
def float_of_ordered_bits(ordered: Any) -> Any:
    return _float32_of_bits(np.int32(ordered ^ ((ordered >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit
def largest_of(values: Any) -> Any:
    """Return the maximum of an array as float32; -inf for an empty array."""
    largest = ordered_bits(np.float32(-np.inf))
    for i in range(values.size):
        largest = max(largest, ordered_bits(to_float32(values[i])))
    return float_of_ordered_bits(largest)


@intrinsic
def nearest(typingctx: Any, value: Any) -> Any:
    """Return the nearest integer by one instruction; a call would prevent vectorization of the loop around it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [_F32]), args)

    return types.float32(types.float32), codegen


@njit(inline="always", fastmath={"contract"})
def exp_float32(x: Any) -> Any:
    """Return e ** x to 2 units in the last place, without a call, so that loops over it vectorize.

    x = n ln 2 + r with abs(r) <= ln 2 / 2; e ** r is its Taylor series to degree 7 (error below 6e-9). Below -87.3,
    where the result would be subnormal, it is 0; above 88 it is infinity.
    """
    clamped = min(max(x, np.float32(-87.3)), np.float32(88.0))
    n = nearest(clamped * np.float32(1.4426950408889634))
    # ln 2 is split into two parts, so that n * ln 2 is exact.
    r = (clamped - n * np.float32(0.693359375)) - n * np.float32(-2.12194440e-4)
    series = np.float32(1.0 / 5040.0)
    series = series * r + np.float32(1.0 / 720.0)
    series = series * r + np.float32(1.0 / 120.0)
    series = series * r + np.float32(1.0 / 24.0)
    series = series * r + np.float32(1.0 / 6.0)
    series = series * r + np.float32(0.5)
    series = series * r + np.float32(1.0)
    series = series * r + np.float32(1.0)
    power = _float32_of_bits(np.int32((np.int32(n) + np.int32(127)) << np.int32(23)))
    value = series * power if x >= np.float32(-87.3) else np.float32(0.0)
    return value if x <= np.float32(88.0) else np.float32(np.inf)


@njit(inline="always", fastmath={"contract"})
def tanh_float32(x: Any) -> Any:
    """Return tanh x with a relative error of 4e-7, without a call.

    Near 0 it is the Taylor series to degree 9, elsewhere it is computed from e ** (-2 abs(x)).
    """
    square = x * x
    series = np.float32(62.0 / 2835.0)
    series = series * square - np.float32(17.0 / 315.0)
    series = series * square + np.float32(2.0 / 15.0)
    series = series * square - np.float32(1.0 / 3.0)
    near = x + x * square * series
    size = abs(x)
    power = exp_float32(np.float32(-2.0) * size)
    far = (np.float32(1.0) - power) / (np.float32(1.0) + power)
    return near if size < np.float32(0.2) else (far if x > np.float32(0.0) else -far)
