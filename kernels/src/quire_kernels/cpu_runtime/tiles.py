"""Products of whole tiles by AMX; requires ``features.multiplies_tiles``.

A tile has up to 16 rows of 64 bytes. One instruction adds the product of two tiles to a third: A has up to 16 rows of
16 units, B 16 units of 16 columns, and C the sums. A *unit* is four bytes along K, as in ``dot_tiles``: two bfloat16 or
four bytes. The stride between B's rows is arbitrary, so a tile of B is read in place from a panel of packed weights, a
key block or a value block.

Each thread has eight tiles. Products use 0 to 3 for sums, 4 and 5 for A, 6 and 7 for B: two by two, so that four loads
feed four products. Only one computation may use tiles between ``configure`` and ``release``. Every worker that
configures must release before it returns, because the system saves a thread's tiles at each context switch.

A sum is accumulated tile by tile along K, so its bits depend on the number of units in a tile, not on the other rows.
"""

import functools
from typing import Any, Literal

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.cpu_runtime.scalars import prefetch_at

TILE_ROWS = 16
TILE_UNITS = 16
TILE_BYTES = 1024
ROW_BYTES = 64

Dot = Literal["tdpbf16ps", "tdpbusd"]
"""The instruction: ``tdpbf16ps`` adds pairs of bfloat16 to float32, ``tdpbusd`` unsigned by signed bytes to int32."""

# The distance between a prefetched weight and its use.
_AHEAD_BYTES = 8192
_LEAST_UNITS = 8

_BYTES = ir.IntType(8).as_pointer()
_I8 = ir.IntType(8)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_LINE = ir.VectorType(_I32, 16)


@intrinsic
def _load_configuration(typingctx: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_tile(builder, "ldtilecfg", place_at(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call_tile(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def configure(memory: Any, rows: Any, units: Any) -> None:
    """Configure the thread's tiles: sums and A with ``rows`` rows, A with ``units`` units, B with as many rows.

    memory  64 bytes, initially 0; they record the thread's configuration, so that repeating it costs nothing
    """
    if memory[48] == rows and memory[55] == units:
        return
    memory[0] = 1  # the palette
    for tile in range(8):
        is_a, is_b = tile == 4 or tile == 5, tile >= 6
        memory[16 + 2 * tile] = 4 * units if is_a else ROW_BYTES
        memory[48 + tile] = units if is_b else rows
    _load_configuration(memory.ctypes.data)


@intrinsic
def copy_line(typingctx: Any, target: Any, source: Any) -> Any:
    """Copy 64 bytes from one address to another."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to, line = (builder.inttoptr(address, _LINE.as_pointer()) for address in args)
        builder.store(builder.load(line, align=4), to, align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@functools.cache  # A model has few sizes, and each layer asks in every step.
def units_of_tile(units: int) -> int | None:
    """Return the largest tile size that divides ``units``, so that tiles of one size cover K without padding.

    Return None if that size is so small that most of the hardware would be idle.
    """
    largest = max(size for size in range(1, TILE_UNITS + 1) if units % size == 0)
    return largest if largest >= _LEAST_UNITS else None


def tile_product(
    dot: Dot, *, down: int, across: int, asks_ahead: bool = False, listed: bool = False, streams: bool = False
) -> Any:
    """Return the intrinsic multiply(a, a_down, a_step, a_stride, b, b_first, b_across, ..., fresh).

    It computes ``down`` by ``across`` tiles C[i, j] (+)= sum over ``steps`` of A[i] . B[j]. All operands are addresses;
    strides and steps are in bytes:

    a, a_down, a_step, a_stride      A's first tile; to the tile below, to the next along K, from row to row
    b, b_first                       B, and from there to its first tile
    b_across, b_step, b_stride       to the tile on the right, to the next along K, from unit to unit
    c, c_down, c_across, c_stride    the sums: to the tile below, to the tile on the right, from row to row
    fresh                            whether sums start at 0 instead of the content of ``c``

    With ``asks_ahead``, B's rows are prefetched some tiles before they are loaded. With ``listed``, B's tiles along K
    are not at a constant distance: ``b`` is the address of a list of addresses, ``b_step`` bytes apart. With
    ``streams``, A's tiles are loaded without displacing B's from the nearest cache.
    """
    load_a = "tileloaddt164" if streams else "tileloadd64"
    cells = [(i, j, across * i + j) for i in range(down) for j in range(across)]

    @intrinsic
    def multiply(
        typingctx: Any,
        a: Any,
        a_down: Any,
        a_step: Any,
        a_stride: Any,
        b: Any,
        b_first: Any,
        b_across: Any,
        b_step: Any,
        b_stride: Any,
        steps: Any,
        c: Any,
        c_down: Any,
        c_across: Any,
        c_stride: Any,
        fresh: Any,
    ) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            a, a_down, a_step, a_stride, b, b_first, b_across, b_step, b_stride, steps, *sums_at, fresh = args
            c, c_down, c_across, c_stride = sums_at

            def sums(i: int, j: int) -> Any:
                return place_at(builder, _sum(builder, c, _times(builder, c_down, i), _times(builder, c_across, j)))

            with builder.if_else(fresh) as (begins, goes_on):
                with begins:
                    for _, _, tile in cells:
                        call_tile(builder, "tilezero", tile)
                with goes_on:
                    for i, j, tile in cells:
                        call_tile(builder, "tileloadd64", tile, sums(i, j), c_stride)
            with cgutils.for_range(builder, steps) as loop:
                along = builder.mul(loop.index, a_step)
                for i in range(down):
                    place = _sum(builder, a, along, _times(builder, a_down, i))
                    call_tile(builder, load_a, 4 + i, place_at(builder, place), a_stride)
                along = builder.add(b, builder.mul(loop.index, b_step))
                if listed:
                    along = builder.load(builder.inttoptr(along, _I64.as_pointer()))
                along = builder.add(along, b_first)
                if asks_ahead:
                    _ask_ahead(builder, along, b_step)
                for j in range(across):
                    place = _sum(builder, along, _times(builder, b_across, j))
                    call_tile(builder, "tileloadd64", 6 + j, place_at(builder, place), b_stride)
                for i, j, tile in cells:
                    call_tile(builder, dot, tile, 4 + i, 6 + j)
            for i, j, tile in cells:
                call_tile(builder, "tilestored64", tile, sums(i, j), c_stride)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(*(i64,) * 14, types.boolean), codegen

    return multiply


def _ask_ahead(builder: Any, address: Any, size: Any) -> None:
    """Prefetch ``size`` bytes that are read some tiles after those at ``address``."""
    address = builder.add(address, ir.Constant(_I64, _AHEAD_BYTES))
    with cgutils.for_range(builder, builder.udiv(size, ir.Constant(_I64, ROW_BYTES))) as loop:
        line = builder.add(address, builder.mul(loop.index, ir.Constant(_I64, ROW_BYTES)))
        prefetch_at(builder, place_at(builder, line))


def call_tile(builder: Any, name: str, *operands: Any) -> None:
    """Call LLVM's intrinsic for an instruction; an int operand is the number of a tile.

    Emit nothing for a target without tiles, where the call is in a branch that never runs.
    """
    if not multiplies_tiles():
        return
    given = [ir.Constant(_I8, operand) if isinstance(operand, int) else operand for operand in operands]
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in given])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), given)


def place_at(builder: Any, address: Any) -> Any:
    """Return an address as a pointer to bytes."""
    return builder.inttoptr(address, _BYTES)


def _times(builder: Any, value: Any, count: int) -> Any:
    return builder.mul(value, ir.Constant(_I64, count))


def _sum(builder: Any, *terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = builder.add(total, term)
    return total
