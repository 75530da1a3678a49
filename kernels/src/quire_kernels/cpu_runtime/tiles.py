"""Products of whole tiles by AMX, where ``features.multiplies_tiles``.

A tile is up to 16 rows of 64 bytes. One instruction adds the product of two tiles to a third: A holds up to 16 rows of
16 units, B 16 units of 16 columns, C the sums. A *unit* is four bytes along K, as in ``dot_tiles``: two bfloat16 or
four bytes. B's rows lie at any distance from one another, so a tile of B is read from a panel of packed weights, from a
key block or from a value block where it lies.

Each thread has eight tiles. Products use 0 to 3 for sums, 4 and 5 for A, 6 and 7 for B: two by two, so that four loads
feed four products. Nothing else may be computed by tiles between ``configure`` and ``release``, and every worker that
configures releases before it returns: a thread must not keep tiles, which the system would save at each switch.

A sum is taken tile by tile along K, so its bits follow from the number of units in a tile and not from the rows beside.
"""

from typing import Any, Literal

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.features import multiplies_tiles

TILE_ROWS = 16
TILE_UNITS = 16
TILE_BYTES = 1024
ROW_BYTES = 64

Dot = Literal["tdpbf16ps", "tdpbusd"]
"""Pairs of bfloat16 into float32, or unsigned by signed bytes into int32."""

# How far ahead of its use a weight is asked for.
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
        _call(builder, "ldtilecfg", _place(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def release(typingctx: Any) -> Any:
    """Give the thread's tiles back."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@njit
def configure(memory: Any, rows: Any, units: Any) -> None:
    """Give the thread tiles: sums and A of ``rows`` rows, A of ``units`` units, B of as many rows, 16 columns.

    memory  64 bytes, 0 at first; they say what the thread has, so that asking twice costs nothing
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


def units_of_tile(units: int) -> int | None:
    """Return the largest number of units a tile can have that ``units`` is a multiple of: tiles of one size cover all
    of K, and nothing is filled up. None where that is so few that most of the hardware would be unused."""
    largest = max(size for size in range(1, TILE_UNITS + 1) if units % size == 0)
    return largest if largest >= _LEAST_UNITS else None


def tile_product(dot: Dot, *, down: int, across: int, asks_ahead: bool = False, listed: bool = False) -> Any:
    """Return the intrinsic multiply(a, a_down, a_step, a_stride, b, b_first, b_across, ..., fresh).

    It computes ``down`` by ``across`` tiles C[i, j] (+)= sum over ``steps`` of A[i] . B[j], all operands addresses,
    strides and steps in bytes:

    a, a_down, a_step, a_stride      A's first tile; to the tile below, to the next along K, from row to row
    b, b_first                       B, and from there to its first tile
    b_across, b_step, b_stride       to the tile beside, to the next along K, from unit to unit
    c, c_down, c_across, c_stride    the sums: the tile below, the tile beside, from row to row
    fresh                            whether sums begin at 0 rather than at what ``c`` holds

    With ``asks_ahead`` memory is asked for B's rows some tiles before they are loaded. With ``listed`` B's tiles along
    K lie apart: ``b`` is the address of a list of what ``b`` else is, and ``b_step`` bytes lead from one to the next.
    """
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
                return _place(builder, _sum(builder, c, _times(builder, c_down, i), _times(builder, c_across, j)))

            with builder.if_else(fresh) as (begins, goes_on):
                with begins:
                    for _, _, tile in cells:
                        _call(builder, "tilezero", tile)
                with goes_on:
                    for i, j, tile in cells:
                        _call(builder, "tileloadd64", tile, sums(i, j), c_stride)
            with cgutils.for_range(builder, steps) as loop:
                along = builder.mul(loop.index, a_step)
                for i in range(down):
                    place = _sum(builder, a, along, _times(builder, a_down, i))
                    _call(builder, "tileloadd64", 4 + i, _place(builder, place), a_stride)
                along = builder.add(b, builder.mul(loop.index, b_step))
                if listed:
                    along = builder.load(builder.inttoptr(along, _I64.as_pointer()))
                along = builder.add(along, b_first)
                if asks_ahead:
                    _ask_ahead(builder, builder.add(along, ir.Constant(_I64, _AHEAD_BYTES)), b_step)
                for j in range(across):
                    place = _sum(builder, along, _times(builder, b_across, j))
                    _call(builder, "tileloadd64", 6 + j, _place(builder, place), b_stride)
                for i, j, tile in cells:
                    _call(builder, dot, tile, 4 + i, 6 + j)
            for i, j, tile in cells:
                _call(builder, "tilestored64", tile, sums(i, j), c_stride)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(*(i64,) * 14, types.boolean), codegen

    return multiply


@intrinsic
def multiply_registers(typingctx: Any, steps: Any) -> Any:
    """Multiply tiles of bfloat16 without loads, four products a step: the peak that others are compared with."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        for tile in range(8):
            _call(builder, "tilezero", tile)
        with cgutils.for_range(builder, args[0]):
            for target, a, b in ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7)):
                _call(builder, "tdpbf16ps", target, a, b)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _ask_ahead(builder: Any, address: Any, size: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [_BYTES, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [_BYTES], kind)
    read, all_levels, data = (ir.Constant(_I32, number) for number in (0, 3, 1))
    with cgutils.for_range(builder, builder.udiv(size, ir.Constant(_I64, ROW_BYTES))) as loop:
        line = builder.add(address, builder.mul(loop.index, ir.Constant(_I64, ROW_BYTES)))
        builder.call(function, [_place(builder, line), read, all_levels, data])


def _call(builder: Any, name: str, *operands: Any) -> None:
    """Call LLVM's intrinsic of an instruction; a number names a tile.

    For a target without tiles nothing is emitted: there the call stands in a branch that is never taken.
    """
    if not multiplies_tiles():
        return
    given = [ir.Constant(_I8, operand) if isinstance(operand, int) else operand for operand in operands]
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in given])
    builder.call(builder.module.declare_intrinsic(f"llvm.x86.{name}", (), kind), given)


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _BYTES)


def _times(builder: Any, value: Any, count: int) -> Any:
    return builder.mul(value, ir.Constant(_I64, count))


def _sum(builder: Any, *terms: Any) -> Any:
    total = terms[0]
    for term in terms[1:]:
        total = builder.add(total, term)
    return total
