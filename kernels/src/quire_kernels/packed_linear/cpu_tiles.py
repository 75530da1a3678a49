"""Packed linear layers with AMX's tiles, in bfloat16 and int8."""

from typing import Any

import numpy as np
from numba import carray, njit

from quire_kernels.cpu_runtime import Worker
from quire_kernels.cpu_runtime.dot_tiles import PANEL, advance
from quire_kernels.cpu_runtime.features import multiplies_tiles
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    await_count,
    fetch_add,
    float32_pointer,
    int32_pointer,
    storage_pointer,
)
from quire_kernels.cpu_runtime.tile_results import store_rows
from quire_kernels.cpu_runtime.tiles import (
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_UNITS,
    configure,
    copy_line,
    release,
    tile_product,
)
from quire_kernels.packed_linear import INT8_UNIT
from quire_kernels.packed_linear.cpu_rows import PANEL_UNIT_BYTES, QUANTISED, quantise, store_bytes, store_sums
from quire_kernels.packed_linear.cpu_sweep import BLOCK_BYTES, BLOCK_ROWS, PENDING, sweep_rows

STRETCHES = 26
"""The place in the argument block of the counters of the items that were taken from each stretch."""

# The first row tiles that use a part of a panel prefetch the next part.
_PAIRS_1 = tile_product("tdpbf16ps", down=1, across=2, asks_ahead=True)
_PAIRS_2 = tile_product("tdpbf16ps", down=2, across=2, streams=True)
_PAIRS_2_FIRST = tile_product("tdpbf16ps", down=2, across=2, asks_ahead=True)
_BYTES_1 = tile_product("tdpbusd", down=1, across=2, asks_ahead=True)
_BYTES_2 = tile_product("tdpbusd", down=2, across=2, streams=True)
_BYTES_2_FIRST = tile_product("tdpbusd", down=2, across=2, asks_ahead=True)


@njit
def _multiply_tiles(
    is_bytes: Any, tiles: Any, is_first: Any, a: Any, a_down: Any, b: Any, units: Any, steps: Any, c: Any, fresh: Any
) -> None:
    """Multiply one or two tiles of rows by a part of a panel: C[16 tiles, 32] (+)= A . W."""
    step, line, unit, down = units * PANEL_UNIT_BYTES, ROW_BYTES, PANEL_UNIT_BYTES, TILE_ROWS * PANEL_UNIT_BYTES
    if is_bytes:
        if tiles == 1:
            _BYTES_1(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)
        elif is_first:
            _BYTES_2_FIRST(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)
        else:
            _BYTES_2(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)
    elif tiles == 1:
        _PAIRS_1(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)
    elif is_first:
        _PAIRS_2_FIRST(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)
    else:
        _PAIRS_2(a, a_down, TILE_BYTES, line, b, 0, line, step, unit, steps, c, down, line, unit, fresh)


@njit
def _copy_in_tiles(source: Any, target: Any, units: Any, steps: Any) -> None:
    """Copy a row of activations into tiles of ``units`` units each."""
    for step in range(steps):
        part, place = source + step * units * 4, target + step * TILE_BYTES
        given, held = carray(int32_pointer(part), units), carray(int32_pointer(place), units)
        for i in range(units):
            held[i] = given[i]


@njit
def _lay_rows(
    block: Any,
    is_bytes: Any,
    x: Any,
    x_stride: Any,
    inputs: Any,
    begin: Any,
    end: Any,
    laid: Any,
    units: Any,
    steps: Any,
    scales: Any,
    zeros: Any,
) -> None:
    """Write rows of activations into tiles of ``units`` units each; for int8, quantize them first.

    Whole lines are copied tile by tile, so that writes are in the order of memory.
    """
    top = begin
    while top < end:
        tile = top // TILE_ROWS
        target, bottom = laid + tile * steps * TILE_BYTES, min(end, (tile + 1) * TILE_ROWS)
        if not is_bytes and units == TILE_UNITS:
            for step in range(steps):
                for row in range(top, bottom):
                    place = target + step * TILE_BYTES + (row - tile * TILE_ROWS) * ROW_BYTES
                    copy_line(place, x + row * x_stride + step * ROW_BYTES)
        else:
            for row in range(top, bottom):
                source, place = x + row * x_stride, target + (row - tile * TILE_ROWS) * ROW_BYTES
                if is_bytes:
                    quantise(block, source, inputs, place, units * INT8_UNIT, TILE_BYTES, steps, scales, zeros, row)
                else:
                    _copy_in_tiles(source, place, units, steps)
        top = bottom


@njit
def _store_tiles(
    block: Any, is_bytes: Any, place: tuple[Any, ...], zeros: Any, scales: Any, vectors: tuple[Any, Any, Any], last: Any
) -> None:
    """Store the rows of one or two tiles.

    place  address of the sums, first row, last row + 1, outputs, first column, columns, address of the result, bytes
           per number
    """
    sums, top, bottom, outputs, column, columns, out, size = place
    if not is_bytes and columns == PANEL:
        target = storage_pointer(block, out + (top * outputs + column) * size)
        store_rows(float32_pointer(sums), bottom - top, advance(vectors[2], column), target, outputs)
        return
    for row in range(top, bottom):
        found, target = sums + (row - top) * PANEL_UNIT_BYTES, out + (row * outputs + column) * size
        if is_bytes:
            store_bytes(block, found, zeros[row], scales[row], vectors, column, columns, last, target)
        else:
            store_sums(block, found, vectors[2], column, columns, last, target)


@njit
def _store_pending(block: Any, pending: Any, outputs: Any) -> None:
    """Store the block that a sweep has left in its state, if there is one."""
    if pending[3]:
        target = storage_pointer(block, pending[1])
        store_rows(float32_pointer(pending[0]), pending[3], float32_pointer(pending[2]), target, outputs)
        pending[3] = 0


def _tile_worker(block: Any) -> None:
    """Write the rows into tiles first, which for int8 quantizes them, then multiply.

    A part of a panel that fits into the nearest cache is used for all row tiles of an item before the next part is
    loaded. If a panel has several parts, the sums are kept between them.

    The items are divided into stretches, and each thread begins with another one: it reads the panels that it has
    prefetched, and the rows that are in its second-level cache. A thread that has finished helps with the others.
    """
    counter = as_int64_pointer(block)
    a = carray(counter, STRETCHES)
    items, rows, inputs, outputs = a[1], a[4], a[5], a[6]
    x, x_stride, laid, weights, out, size = a[7], a[8], a[9], a[10], a[11], a[12]
    vectors = (int32_pointer(a[14]), float32_pointer(a[13]), float32_pointer(a[15]))
    laying, rows_each, chunks, chunk_rows, panels_each = a[16], a[17], a[18], a[19], a[20]
    units, steps, steps_each, is_bytes = a[21], a[22], a[23], a[24] != 0
    stretches = a[25]
    row_tile_bytes, panel_bytes = steps * TILE_BYTES, steps * units * PANEL_UNIT_BYTES
    behind = laid + (rows + TILE_ROWS - 1) // TILE_ROWS * row_tile_bytes
    scales, zeros = carray(float32_pointer(behind), rows), carray(int32_pointer(behind + rows * 4), rows)
    panels = (outputs + PANEL - 1) // PANEL
    keeps = steps_each < steps
    # The sums of a panel with parts; otherwise of two blocks of a sweep, and of the rows that are left. Tiles of rows
    # that cross cache lines take twice as long.
    memory = np.empty((chunk_rows if keeps else 3 * BLOCK_ROWS) * PANEL_UNIT_BYTES + ROW_BYTES, np.uint8)
    last, configuration, pending = np.empty(PANEL, np.float32), np.zeros(64, np.uint8), np.zeros(PENDING, np.int64)
    configure(configuration, min(rows, TILE_ROWS), units)
    while True:
        item = fetch_add(counter, 0)
        if item >= laying:
            break
        first, end = item * rows_each, min(rows, (item + 1) * rows_each)
        _lay_rows(block, is_bytes, x, x_stride, inputs, first, end, laid, units, steps, scales, zeros)
        fetch_add(counter, QUANTISED)
    await_count(counter, QUANTISED, laying)
    products = items - laying
    groups = products // chunks
    stretch, left = (item - laying) % stretches, stretches
    while left > 0:
        begin, end = stretch * products // stretches, (stretch + 1) * products // stretches
        item = begin + fetch_add(counter, STRETCHES + stretch)
        if item >= end:
            stretch, left = (stretch + 1) % stretches, left - 1
            continue
        first_panel, chunk = item % groups * panels_each, item // groups
        last_panel = min(panels, first_panel + panels_each)
        sums = (memory.ctypes.data + ROW_BYTES - 1) // ROW_BYTES * ROW_BYTES
        begin, end = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        for panel in range(first_panel, last_panel):
            column = panel * PANEL
            columns = min(PANEL, outputs - column)
            blocks = (end - begin) // BLOCK_ROWS
            sweeps = blocks > 1 and not is_bytes and columns == PANEL
            swept = begin + blocks * BLOCK_ROWS if sweeps else begin
            if not sweeps:
                _store_pending(block, pending, outputs)
            for step in range(0, steps, steps_each):
                count = min(steps_each, steps - step)
                part = weights + panel * panel_bytes + step * units * PANEL_UNIT_BYTES
                if sweeps:
                    sweep_rows(
                        laid + begin // TILE_ROWS * row_tile_bytes + step * TILE_BYTES,
                        row_tile_bytes,
                        part,
                        units,
                        count,
                        blocks,
                        sums,
                        keeps,
                        step == 0,
                        step + count == steps,
                        a[15] + column * 4,
                        out + (begin * outputs + column) * size,
                        outputs * size,
                        pending.ctypes.data,
                    )
                for top in range(swept, end, BLOCK_ROWS):
                    bottom = min(end, top + BLOCK_ROWS)
                    tiles = (bottom - top + TILE_ROWS - 1) // TILE_ROWS
                    own = sums + ((top - begin) * PANEL_UNIT_BYTES if keeps else 2 * BLOCK_BYTES)
                    place = laid + top // TILE_ROWS * row_tile_bytes + step * TILE_BYTES
                    _multiply_tiles(
                        is_bytes, tiles, top == begin, place, row_tile_bytes, part, units, count, own, step == 0
                    )
                    if step + count < steps:
                        continue
                    store = (own, top, bottom, outputs, column, columns, out, size)
                    _store_tiles(block, is_bytes, store, zeros, scales, vectors, last)
        _store_pending(block, pending, outputs)
    release()


TILES = Worker(_tile_worker) if multiplies_tiles() else None
