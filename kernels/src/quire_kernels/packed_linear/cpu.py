"""Packed linear layers on a CPU: tiles of rows go over panels of weights.

Both ways to multiply read the same panels: vectors of AVX2 or AVX-512 (``_int8_worker``, ``_vector_worker``), and AMX's
tiles (``_tile_worker``). A layer goes one way for every number of rows, since tiles add in another order.

An item of work is a few panels, of which all rows, or a chunk of many, take their share: every weight comes from memory
once, in the order in which it lies there. For int8 the first items quantise the rows, and the others wait until all of
those are done, which is sooner than a second launch would be.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.amx import may_use_tiles
from quire_kernels.cpu_runtime.dot_tiles import (
    PANEL,
    ROWS,
    advance,
    make_pair_product,
    multiply_bytes,
    multiply_floats,
)
from quire_kernels.cpu_runtime.features import byte_products, multiplies_bfloat16, multiplies_tiles
from quire_kernels.cpu_runtime.micro_kernel import is_in_pairs
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    await_count,
    fetch_add,
    float32_pointer,
    float_of_ordered_bits,
    int32_pointer,
    nearest,
    ordered_bits,
    storage_pointer,
    to_float32,
    to_storage,
    uint8_pointer,
)
from quire_kernels.cpu_runtime.tile_results import store_bytes_row, store_row
from quire_kernels.cpu_runtime.tiles import (
    ROW_BYTES,
    TILE_BYTES,
    TILE_ROWS,
    TILE_UNITS,
    configure,
    copy_line,
    release,
    tile_product,
    units_of_tile,
)
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.packed_linear import INT8_UNIT, BFloat16Weights, FloatWeights, Int8Weights

# Below this many products waking a second thread costs more than it saves; to read a weight costs as much as eight.
_PARALLEL_PRODUCTS = 1 << 20
_READ_PRODUCTS = 8
# Rows that an item goes over: many uses of a panel that was read, and still enough items for all threads.
_CHUNK_ROWS = 96
_ITEMS_PER_THREAD = 8
_MOST_PANELS = 8  # of an item of many rows: they stay in the nearer caches
_QUANTISED = 3  # place in the argument block
_PANEL_UNIT_BYTES = PANEL * 4

# By tiles an item goes over more rows: each use of what was read of a panel takes less time. The part of a panel that
# is used at once is to stay in a nearest cache of 48 KiB beside what passes through it.
_TILE_CHUNK_ROWS = 256
_TILE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a product is cut into items."""

    items: int
    chunks: int
    chunk_rows: int
    panels: int
    parallel: bool


def _cut(rows: int, inputs: int, outputs: int, threads: int, *, chunk_rows: int = _CHUNK_ROWS) -> _Cut:
    chunks = -(-rows // chunk_rows)
    panels = -(-outputs // PANEL)
    each = max(1, panels * chunks // (_ITEMS_PER_THREAD * threads))
    each = each if chunks == 1 else min(each, _MOST_PANELS)
    return _Cut(
        items=chunks * -(-panels // each),
        chunks=chunks,
        chunk_rows=-(-rows // chunks),
        panels=each,
        parallel=(rows + _READ_PRODUCTS) * inputs * outputs >= _PARALLEL_PRODUCTS,
    )


@njit
def _quantise(
    block: Any,
    source: Any,
    inputs: Any,
    target: Any,
    width: Any,
    step: Any,
    parts: Any,
    scales: Any,
    zeros: Any,
    row: Any,
) -> None:
    """Quantise a row to levels q from 0 to 255, so that x is about scale * (q - zero).

    The levels are written in ``parts`` stretches of ``width``, each ``step`` bytes after the one before.
    """
    x = carray(storage_pointer(block, source), inputs)
    least = ordered_bits(np.float32(0.0))
    largest = least
    for i in range(inputs):
        bits = ordered_bits(to_float32(x[i]))
        least, largest = min(least, bits), max(largest, bits)
    low, high = float_of_ordered_bits(least), float_of_ordered_bits(largest)
    inverse = np.float32(255.0) / (high - low) if high > low else np.float32(0.0)
    zero = np.int32(nearest(-low * inverse))
    for part in range(parts):
        levels, given = carray(uint8_pointer(target + part * step), width), x[part * width :]
        there = min(width, given.size)
        for i in range(there):
            # Both ends may be rounded up.
            levels[i] = np.uint8(min(np.int32(nearest(to_float32(given[i]) * inverse)) + zero, np.int32(255)))
        for i in range(there, width):
            levels[i] = np.uint8(0)
    # NaN or infinity among the activations makes the scale one of them, and with it the row's results.
    scales[row] = (high - low) / np.float32(255.0)
    zeros[row] = zero


def _int8_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 22)
    items, rows, inputs, filled, outputs = a[1], a[4], a[5], a[6], a[7]
    x, x_stride, levels, weights, out, size = a[8], a[9], a[10], a[11], a[12], a[13]
    vectors = (int32_pointer(a[15]), float32_pointer(a[14]), float32_pointer(a[16]))
    quantising, rows_each, chunks, chunk_rows, panels_each = a[17], a[18], a[19], a[20], a[21]
    scales = carray(float32_pointer(levels + rows * filled), rows)
    zeros = carray(int32_pointer(levels + rows * filled + rows * 4), rows)
    panels = (outputs + PANEL - 1) // PANEL
    sums, last = np.empty((ROWS, PANEL), np.int32), np.empty(PANEL, np.float32)
    is_ready = False
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        if item < quantising:
            for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
                _quantise(
                    block, x + row * x_stride, inputs, levels + row * filled, filled, filled, 1, scales, zeros, row
                )
            fetch_add(counter, _QUANTISED)
            continue
        if not is_ready:
            await_count(counter, _QUANTISED, quantising)
            is_ready = True
        first_panel, chunk = (item - quantising) // chunks * panels_each, (item - quantising) % chunks
        begin = chunk * chunk_rows
        count = min(rows, begin + chunk_rows) - begin
        tiles = (count + ROWS - 1) // ROWS
        for panel in range(first_panel, min(panels, first_panel + panels_each)):
            column = panel * PANEL
            packed, columns = int32_pointer(weights + column * filled), min(PANEL, outputs - column)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                units, depth = int32_pointer(levels + top * filled), filled // INT8_UNIT
                multiply_bytes(bottom - top, units, depth, packed, depth, int32_pointer(sums.ctypes.data))
                for row in range(top, bottom):
                    found, target = sums.ctypes.data + (row - top) * PANEL * 4, out + (row * outputs + column) * size
                    _store_bytes(block, found, zeros[row], scales[row], vectors, column, columns, last, target)


@njit
def _store_bytes(
    block: Any,
    sums: Any,
    zero: Any,
    scale: Any,
    vectors: tuple[Any, Any, Any],
    column: Any,
    columns: Any,
    last: Any,
    target: Any,
) -> None:
    """Store a row's ``columns`` of a panel, of whole sums. The last panel may have fewer than 32.

    vectors  the sums of each output's weights, their scales and the bias
    """
    found, sums_each = int32_pointer(sums), advance(vectors[0], column)
    scale_each, bias = advance(vectors[1], column), advance(vectors[2], column)
    if columns == PANEL:
        store_bytes_row(found, zero, sums_each, scale, scale_each, bias, storage_pointer(block, target))
    else:
        store_bytes_row(found, zero, sums_each, scale, scale_each, bias, float32_pointer(last.ctypes.data))
        _store_part(block, last, target, columns)


@njit
def _store_sums(block: Any, sums: Any, bias: Any, column: Any, columns: Any, last: Any, target: Any) -> None:
    """Store a row's ``columns`` of a panel, of float32 sums."""
    if columns == PANEL:
        store_row(float32_pointer(sums), advance(bias, column), storage_pointer(block, target))
    else:
        store_row(float32_pointer(sums), advance(bias, column), float32_pointer(last.ctypes.data))
        _store_part(block, last, target, columns)


@njit
def _store_part(block: Any, values: Any, target: Any, columns: Any) -> None:
    stored = carray(storage_pointer(block, target), columns)
    for i in range(columns):
        stored[i] = to_storage(values[i], stored[i])


# Not in a closure, whose compiled functions numba takes for others in each process, and would never find on disk.
# Where there are no pairs, nothing asks for them.
_multiply_pairs: Any = make_pair_product() if multiplies_bfloat16() else multiply_floats


@njit
def _multiply_rows(block: Any, rows: Any, a: Any, stride: Any, weights: Any, units: Any, c: Any) -> None:
    """Multiply a tile of rows by a panel: pairs of bfloat16, or float32."""
    if is_in_pairs(block):
        _multiply_pairs(rows, a, stride, weights, units, c)
    else:
        multiply_floats(rows, a, stride, weights, units, c)


def _vector_worker(block: Any) -> None:
    """Multiply rows as they are, whose sums are float32."""
    counter = as_int64_pointer(block)
    a = carray(counter, 15)
    items, rows, units, outputs = a[1], a[3], a[4], a[5]
    x, x_stride, weights, out, bias = a[6], a[7], a[8], a[9], float32_pointer(a[10])
    chunks, chunk_rows, panels_each, size = a[11], a[12], a[13], a[14]
    panels = (outputs + PANEL - 1) // PANEL
    sums, last = np.empty((ROWS, PANEL), np.float32), np.empty(PANEL, np.float32)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        first_panel, chunk = item // chunks * panels_each, item % chunks
        begin = chunk * chunk_rows
        count = min(rows, begin + chunk_rows) - begin
        tiles = (count + ROWS - 1) // ROWS
        for panel in range(first_panel, min(panels, first_panel + panels_each)):
            column = panel * PANEL
            packed = int32_pointer(weights + panel * units * _PANEL_UNIT_BYTES)
            columns = min(PANEL, outputs - column)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                place, given = float32_pointer(sums.ctypes.data), int32_pointer(x + top * x_stride)
                _multiply_rows(block, bottom - top, given, x_stride // 4, packed, units, place)
                for row in range(top, bottom):
                    found, target = sums.ctypes.data + (row - top) * PANEL * 4, out + (row * outputs + column) * size
                    _store_sums(block, found, bias, column, columns, last, target)


# The first tiles of rows to meet a part of a panel ask memory for the next.
_PAIRS_1 = tile_product("tdpbf16ps", down=1, across=2, asks_ahead=True)
_PAIRS_2 = tile_product("tdpbf16ps", down=2, across=2)
_PAIRS_2_FIRST = tile_product("tdpbf16ps", down=2, across=2, asks_ahead=True)
_BYTES_1 = tile_product("tdpbusd", down=1, across=2, asks_ahead=True)
_BYTES_2 = tile_product("tdpbusd", down=2, across=2)
_BYTES_2_FIRST = tile_product("tdpbusd", down=2, across=2, asks_ahead=True)


@njit
def _multiply_tiles(
    is_bytes: Any, tiles: Any, is_first: Any, a: Any, a_down: Any, b: Any, units: Any, steps: Any, c: Any, fresh: Any
) -> None:
    """Multiply one or two tiles of rows by a part of a panel: C[16 tiles, 32] (+)= A . W."""
    step, line, unit, down = units * _PANEL_UNIT_BYTES, ROW_BYTES, _PANEL_UNIT_BYTES, TILE_ROWS * _PANEL_UNIT_BYTES
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
    """Copy a row of activations so that each ``units`` of it lie in a tile of their own."""
    for step in range(steps):
        part, place = source + step * units * 4, target + step * TILE_BYTES
        if units == TILE_UNITS:
            copy_line(place, part)
        else:
            given, held = carray(int32_pointer(part), units), carray(int32_pointer(place), units)
            for i in range(units):
                held[i] = given[i]


@njit
def _lay_row(
    block: Any,
    is_bytes: Any,
    source: Any,
    inputs: Any,
    target: Any,
    units: Any,
    steps: Any,
    scales: Any,
    zeros: Any,
    row: Any,
) -> None:
    """Lay a row of activations so that each ``units`` of it are a row of a tile; for int8 as levels."""
    if is_bytes:
        _quantise(block, source, inputs, target, units * INT8_UNIT, TILE_BYTES, steps, scales, zeros, row)
    else:
        _copy_in_tiles(source, target, units, steps)


@njit
def _store_tiles(
    block: Any, is_bytes: Any, place: tuple[Any, ...], zeros: Any, scales: Any, vectors: tuple[Any, Any, Any], last: Any
) -> None:
    """Store rows of one or two tiles.

    place  address of the sums, first row, row behind the last, outputs, first column, columns, address of the result,
           bytes of a number
    """
    sums, top, bottom, outputs, column, columns, out, size = place
    for row in range(top, bottom):
        found, target = sums + (row - top) * _PANEL_UNIT_BYTES, out + (row * outputs + column) * size
        if is_bytes:
            _store_bytes(block, found, zeros[row], scales[row], vectors, column, columns, last, target)
        else:
            _store_sums(block, found, vectors[2], column, columns, last, target)


def _tile_worker(block: Any) -> None:
    """Lay the rows in tiles first, which for int8 quantises them, then multiply.

    A part of a panel that fits in the nearest cache goes over all tiles of rows of an item before the next part comes.
    Where a panel has several parts, their sums are kept between them.
    """
    counter = as_int64_pointer(block)
    a = carray(counter, 25)
    items, rows, inputs, outputs = a[1], a[4], a[5], a[6]
    x, x_stride, laid, weights, out, size = a[7], a[8], a[9], a[10], a[11], a[12]
    vectors = (int32_pointer(a[14]), float32_pointer(a[13]), float32_pointer(a[15]))
    laying, rows_each, chunks, chunk_rows, panels_each = a[16], a[17], a[18], a[19], a[20]
    units, steps, steps_each, is_bytes = a[21], a[22], a[23], a[24] != 0
    row_tile_bytes, panel_bytes = steps * TILE_BYTES, steps * units * _PANEL_UNIT_BYTES
    behind = laid + (rows + TILE_ROWS - 1) // TILE_ROWS * row_tile_bytes
    scales, zeros = carray(float32_pointer(behind), rows), carray(int32_pointer(behind + rows * 4), rows)
    panels = (outputs + PANEL - 1) // PANEL
    keeps = steps_each < steps
    sums = np.empty((panels_each * chunk_rows if keeps else 2 * TILE_ROWS, PANEL), np.int32)
    last, configuration = np.empty(PANEL, np.float32), np.zeros(64, np.uint8)
    is_ready = False
    configure(configuration, min(rows, TILE_ROWS), units)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        if item < laying:
            for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
                source = x + row * x_stride
                target = laid + row // TILE_ROWS * row_tile_bytes + row % TILE_ROWS * ROW_BYTES
                _lay_row(block, is_bytes, source, inputs, target, units, steps, scales, zeros, row)
            fetch_add(counter, _QUANTISED)
            continue
        if not is_ready:
            await_count(counter, _QUANTISED, laying)
            is_ready = True
        first_panel, chunk = (item - laying) // chunks * panels_each, (item - laying) % chunks
        last_panel = min(panels, first_panel + panels_each)
        begin, end = chunk * chunk_rows, min(rows, (chunk + 1) * chunk_rows)
        for step in range(0, steps, steps_each):
            count = min(steps_each, steps - step)
            for panel in range(first_panel, last_panel):
                part = weights + panel * panel_bytes + step * units * _PANEL_UNIT_BYTES
                column = panel * PANEL
                columns = min(PANEL, outputs - column)
                for top in range(begin, end, 2 * TILE_ROWS):
                    bottom = min(end, top + 2 * TILE_ROWS)
                    tiles = (bottom - top + TILE_ROWS - 1) // TILE_ROWS
                    own = sums.ctypes.data
                    if keeps:
                        own += ((panel - first_panel) * chunk_rows + top - begin) * _PANEL_UNIT_BYTES
                    place = laid + top // TILE_ROWS * row_tile_bytes + step * TILE_BYTES
                    _multiply_tiles(
                        is_bytes, tiles, top == begin, place, row_tile_bytes, part, units, count, own, step == 0
                    )
                    if step + count < steps:
                        continue
                    store = (own, top, bottom, outputs, column, columns, out, size)
                    _store_tiles(block, is_bytes, store, zeros, scales, vectors, last)
    release()


_INT8 = Worker(_int8_worker)
_VECTORS = Worker(_vector_worker)
_TILES = Worker(_tile_worker) if multiplies_tiles() else None


def supports_bfloat16() -> bool:
    return multiplies_bfloat16()


def multiplies_bytes() -> bool:
    return byte_products() != "none"


def int8_linear(x: Tensor, weights: Int8Weights) -> Tensor:
    rows, outputs = x.shape[0], weights.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype)
    if not out.numel():
        return out
    if (units := _units_of_tile(weights.panels)) is not None:
        return _by_tiles(x, weights, units, out)
    filled = weights.panels.shape[1] * INT8_UNIT
    levels = torch.empty(rows * (filled + 8), dtype=torch.uint8)  # and a scale and a zero point of each row
    threads = torch.get_num_threads()
    cut = _cut(rows, filled, outputs, threads)
    rows_each = -(-rows // (2 * threads))
    quantising = -(-rows // rows_each)
    arguments = (
        0,
        rows,
        x.shape[1],
        filled,
        outputs,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        levels.data_ptr(),
        weights.panels.data_ptr(),
        out.data_ptr(),
        x.element_size(),
        weights.scales.data_ptr(),
        weights.sums.data_ptr(),
        weights.bias.data_ptr(),
        quantising,
        rows_each,
        cut.chunks,
        cut.chunk_rows,
        cut.panels,
    )
    launch(_INT8, x.dtype, quantising + cut.items, arguments, parallel=cut.parallel)
    return out


def bfloat16_linear(x: Tensor, weights: BFloat16Weights) -> Tensor:
    if not multiplies_bfloat16():
        raise UnsupportedDeviceError("bfloat16_linear: this CPU lacks AVX512-BF16; ask supports_bfloat16 first")
    rows, outputs = x.shape[0], weights.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype)
    if not out.numel():
        return out
    if (units := _units_of_tile(weights.panels)) is not None:
        return _by_tiles(x, weights, units, out)
    return _by_vectors(x, weights, out)


def float_linear(x: Tensor, weights: FloatWeights) -> Tensor:
    out = torch.empty((x.shape[0], weights.outputs), dtype=x.dtype)
    if not out.numel():
        return out
    return _by_vectors(x, weights, out)


def _by_vectors(x: Tensor, weights: BFloat16Weights | FloatWeights, out: Tensor) -> Tensor:
    cut = _cut(x.shape[0], weights.inputs, weights.outputs, torch.get_num_threads())
    arguments = (
        x.shape[0],
        weights.panels.shape[1],
        weights.outputs,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        weights.panels.data_ptr(),
        out.data_ptr(),
        weights.bias.data_ptr(),
        cut.chunks,
        cut.chunk_rows,
        cut.panels,
        x.element_size(),
    )
    launch(_VECTORS, x.dtype, cut.items, arguments, parallel=cut.parallel)
    return out


def _units_of_tile(panels: Tensor) -> int | None:
    """Return of how many units of K a layer's tiles are, or None where vectors multiply instead."""
    return units_of_tile(panels.shape[1]) if may_use_tiles() else None


def _by_tiles(x: Tensor, weights: Int8Weights | BFloat16Weights, units: int, out: Tensor) -> Tensor:
    assert _TILES is not None
    rows, threads = x.shape[0], torch.get_num_threads()
    steps = weights.panels.shape[1] // units
    row_tiles = -(-rows // TILE_ROWS)
    # Rows in tiles, and for int8 a scale and a zero point of each.
    laid = torch.empty(row_tiles * steps * TILE_BYTES + rows * 8, dtype=torch.uint8)
    cut = _cut(rows, weights.inputs, weights.outputs, threads, chunk_rows=_TILE_CHUNK_ROWS)
    # One pass over a panel needs no part of it twice.
    parts = -(-steps // _TILE_STEPS) if row_tiles > 2 else 1
    rows_each = -(-rows // (2 * threads))
    laying = -(-rows // rows_each)
    is_bytes = isinstance(weights, Int8Weights)
    arguments = (
        0,
        rows,
        weights.inputs,
        weights.outputs,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        laid.data_ptr(),
        weights.panels.data_ptr(),
        out.data_ptr(),
        x.element_size(),
        weights.scales.data_ptr() if isinstance(weights, Int8Weights) else 0,
        weights.sums.data_ptr() if isinstance(weights, Int8Weights) else 0,
        weights.bias.data_ptr(),
        laying,
        rows_each,
        cut.chunks,
        _filled(cut.chunk_rows, 2 * TILE_ROWS),
        cut.panels,
        units,
        steps,
        -(-steps // parts),
        int(is_bytes),
    )
    launch(_TILES, x.dtype, laying + cut.items, arguments, parallel=cut.parallel)
    return out


def _filled(count: int, unit: int) -> int:
    return -(-count // unit) * unit
