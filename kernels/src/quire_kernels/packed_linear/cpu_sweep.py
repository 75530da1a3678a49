"""The product of many rows by one panel with AMX's tiles, in bfloat16.

The rows are divided into blocks of 32. While a block is multiplied, the sums of the block before it are rounded and
stored, two or more rows in each step along K: the instructions of both fit into the time that the tiles take, and
stores that wait for memory delay no product. Sums therefore alternate between two buffers, and the last block of a
panel is stored during the first block of the next panel. All blocks together prefetch the next part of the weights.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from quire_kernels.cpu_runtime.dot_tiles import PANEL
from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.cpu_runtime.scalars import prefetch_at
from quire_kernels.cpu_runtime.tile_results import round_pairs
from quire_kernels.cpu_runtime.tiles import ROW_BYTES, TILE_BYTES, TILE_ROWS, call_tile, place_at

BLOCK_ROWS = 2 * TILE_ROWS
BLOCK_BYTES = BLOCK_ROWS * PANEL * 4
"""The size of a block's sums."""

PENDING = 5
"""The int64 numbers of the state between calls: the block that is not stored yet (its sums, its result, its bias, its
rows or 0), and the buffer of the next sums."""

_I64 = ir.IntType(64)
_FLOATS = ir.VectorType(ir.FloatType(), 16)
_CELLS = ((0, 4, 6), (1, 4, 7), (2, 5, 6), (3, 5, 7))
_UNIT_BYTES = PANEL * 4


@intrinsic
def sweep_rows(
    typingctx: Any,
    a: Any,
    row_tile_bytes: Any,
    b: Any,
    units: Any,
    steps: Any,
    blocks: Any,
    c: Any,
    keeps: Any,
    fresh: Any,
    finishes: Any,
    bias: Any,
    out: Any,
    out_stride: Any,
    state: Any,
) -> Any:
    """Multiply ``blocks`` of 32 rows by a part of a panel, and store the results of all but the last.

    a, row_tile_bytes  address of the rows in tiles, and bytes from one tile of rows to the next
    b, units, steps    address of the part, units of K per tile, tiles along K
    c, keeps           address of the sums: of all blocks if the panel has several parts (``keeps``), else two buffers
    fresh, finishes    whether this is the first and the last part of the panel
    out, out_stride    address of the first result in bfloat16, bytes from row to row
    state              address of ``PENDING`` numbers, initially 0; ``store_rows`` stores the block that is left
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not multiplies_tiles():
            return context.get_dummy_value()
        a, row_tile_bytes, b, units, steps, blocks, c, keeps, fresh, finishes, bias, out, out_stride, state = args
        numbers = [builder.gep(builder.inttoptr(state, _I64.as_pointer()), [_number(i)]) for i in range(PENDING)]
        step_bytes = builder.mul(units, _number(_UNIT_BYTES))
        rows_each = builder.udiv(builder.add(steps, _number(BLOCK_ROWS - 1)), steps)  # the quotient is rounded up

        # All blocks share the prefetching of the next part, which follows in memory, into the second-level cache.
        next_b = builder.add(b, builder.mul(steps, step_bytes))
        lines = builder.udiv(step_bytes, _number(ROW_BYTES))
        lines_each = builder.udiv(builder.add(lines, builder.sub(blocks, _number(1))), blocks)

        def block(index: Any) -> None:
            old_c, old_out, old_bias, left, buffer = map(builder.load, numbers)
            own_c = builder.add(c, builder.mul(builder.select(keeps, index, buffer), _number(BLOCK_BYTES)))
            rows = builder.add(a, builder.mul(index, builder.mul(row_tile_bytes, _number(2))))
            places = [own_c, builder.add(own_c, _number(ROW_BYTES))]
            places += [builder.add(place, _number(BLOCK_BYTES // 2)) for place in places]
            with builder.if_else(fresh) as (begins, goes_on):
                with begins:
                    for tile in range(4):
                        call_tile(builder, "tilezero", tile)
                with goes_on:
                    for tile, place in enumerate(places):
                        call_tile(builder, "tileloadd64", tile, place_at(builder, place), _number(_UNIT_BYTES))
            is_none = builder.icmp_signed("==", left, _number(0))
            old_bias = builder.select(is_none, bias, old_bias)
            biases = [_load(builder, builder.add(old_bias, _number(64 * half))) for half in range(2)]
            with cgutils.for_range(builder, steps) as loop:
                above = builder.add(rows, builder.mul(loop.index, _number(TILE_BYTES)))
                below = builder.add(above, row_tile_bytes)
                left_b = builder.add(b, builder.mul(loop.index, step_bytes))
                right_b = builder.add(left_b, _number(ROW_BYTES))
                # Streamed rows do not displace the panel from the nearest cache.
                line, unit = _number(ROW_BYTES), _number(_UNIT_BYTES)
                call_tile(builder, "tileloaddt164", 4, place_at(builder, above), line)
                call_tile(builder, "tileloadd64", 6, place_at(builder, left_b), unit)
                call_tile(builder, "tdpbf16ps", *_CELLS[0])
                call_tile(builder, "tileloadd64", 7, place_at(builder, right_b), unit)
                call_tile(builder, "tdpbf16ps", *_CELLS[1])
                call_tile(builder, "tileloaddt164", 5, place_at(builder, below), line)
                slot = builder.add(builder.mul(index, steps), loop.index)
                ahead = builder.add(next_b, builder.mul(slot, builder.mul(lines_each, line)))
                with cgutils.for_range(builder, lines_each) as lines:
                    place = builder.add(ahead, builder.mul(lines.index, line))
                    prefetch_at(builder, place_at(builder, place), nearest=False)
                begin = builder.mul(loop.index, rows_each)
                end = _smaller(builder, left, builder.add(begin, rows_each))
                with cgutils.for_range_slice(builder, begin, end, _number(1), _I64) as (row, _):
                    sums = builder.add(old_c, builder.mul(row, _number(_UNIT_BYTES)))
                    results = [
                        builder.fadd(_load(builder, builder.add(sums, _number(64 * half))), biases[half])
                        for half in range(2)
                    ]
                    pairs = round_pairs(builder, results)
                    target = builder.add(old_out, builder.mul(row, out_stride))
                    builder.store(pairs, builder.inttoptr(target, pairs.type.as_pointer()), align=2)
                call_tile(builder, "tdpbf16ps", *_CELLS[2])
                call_tile(builder, "tdpbf16ps", *_CELLS[3])
            for tile, place in enumerate(places):
                call_tile(builder, "tilestored64", tile, place_at(builder, place), _number(_UNIT_BYTES))
            own_out = builder.add(out, builder.mul(builder.mul(index, _number(BLOCK_ROWS)), out_stride))
            pending = builder.select(finishes, _number(BLOCK_ROWS), _number(0))
            changed = builder.sub(_number(1), buffer)
            for place, value in zip(numbers, (own_c, own_out, bias, pending, changed), strict=True):
                builder.store(value, place)

        with cgutils.for_range(builder, blocks) as outer:
            block(outer.index)
        return context.get_dummy_value()

    i64, flag = types.int64, types.boolean
    return types.void(i64, i64, i64, i64, i64, i64, i64, flag, flag, flag, i64, i64, i64, i64), codegen


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _smaller(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
