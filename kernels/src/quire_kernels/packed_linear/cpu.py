"""Packed linear layers on a CPU: tiles of rows go over panels of weights.

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
from quire_kernels.cpu_runtime.dot_tiles import PANEL, ROWS, advance, make_pair_product, multiply_bytes
from quire_kernels.cpu_runtime.features import byte_products, multiplies_bfloat16
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
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.packed_linear import INT8_UNIT, PAIR_UNIT, BFloat16Weights, Int8Weights

# Below this many products waking a second thread costs more than it saves; to read a weight costs as much as eight.
_PARALLEL_PRODUCTS = 1 << 20
_READ_PRODUCTS = 8
# Rows that an item goes over: many uses of a panel that was read, and still enough items for all threads.
_CHUNK_ROWS = 96
_ITEMS_PER_THREAD = 8
_MOST_PANELS = 8  # of an item of many rows: they stay in the nearer caches
_QUANTISED = 3  # place in the argument block


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """How a product is cut into items."""

    items: int
    chunks: int
    chunk_rows: int
    panels: int
    parallel: bool


def _cut(rows: int, inputs: int, outputs: int, threads: int) -> _Cut:
    chunks = -(-rows // _CHUNK_ROWS)
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
    block: Any, source: Any, inputs: Any, target: Any, filled: Any, scales: Any, zeros: Any, row: Any
) -> None:
    """A row as levels q from 0 to 255, so that x is about scale * (q - zero)."""
    x = carray(storage_pointer(block, source), inputs)
    least = ordered_bits(np.float32(0.0))
    largest = least
    for i in range(inputs):
        bits = ordered_bits(to_float32(x[i]))
        least, largest = min(least, bits), max(largest, bits)
    low, high = float_of_ordered_bits(least), float_of_ordered_bits(largest)
    inverse = np.float32(255.0) / (high - low) if high > low else np.float32(0.0)
    zero = np.int32(nearest(-low * inverse))
    levels = carray(uint8_pointer(target), filled)
    for i in range(inputs):
        # Both ends may be rounded up.
        levels[i] = np.uint8(min(np.int32(nearest(to_float32(x[i]) * inverse)) + zero, np.int32(255)))
    for i in range(inputs, filled):
        levels[i] = np.uint8(0)
    # NaN or infinity among the activations makes the scale one of them, and with it the row's results.
    scales[row] = (high - low) / np.float32(255.0)
    zeros[row] = zero


def _int8_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 22)
    items, rows, inputs, filled, outputs = a[1], a[4], a[5], a[6], a[7]
    x, x_stride, levels, weights, out, size = a[8], a[9], a[10], a[11], a[12], a[13]
    weight_scales, weight_sums, bias = float32_pointer(a[14]), int32_pointer(a[15]), float32_pointer(a[16])
    quantising, rows_each, chunks, chunk_rows, panels_each = a[17], a[18], a[19], a[20], a[21]
    scales = carray(float32_pointer(levels + rows * filled), rows)
    zeros = carray(int32_pointer(levels + rows * filled + rows * 4), rows)
    panels = (outputs + PANEL - 1) // PANEL
    sums, last = np.empty((ROWS, PANEL), np.int32), np.empty(PANEL, np.float32)
    one = carray(storage_pointer(block, out), 1)[0]
    is_ready = False
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        if item < quantising:
            for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
                _quantise(block, x + row * x_stride, inputs, levels + row * filled, filled, scales, zeros, row)
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
            panel_sums, panel_scales = advance(weight_sums, column), advance(weight_scales, column)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                units, depth = int32_pointer(levels + top * filled), filled // INT8_UNIT
                multiply_bytes(bottom - top, units, depth, packed, depth, int32_pointer(sums.ctypes.data))
                for row in range(top, bottom):
                    own = int32_pointer(sums.ctypes.data + (row - top) * PANEL * 4)
                    target = storage_pointer(block, out + (row * outputs + column) * size)
                    if columns == PANEL:
                        store_bytes_row(
                            own, zeros[row], panel_sums, scales[row], panel_scales, advance(bias, column), target
                        )
                    else:
                        whole = float32_pointer(last.ctypes.data)
                        store_bytes_row(
                            own, zeros[row], panel_sums, scales[row], panel_scales, advance(bias, column), whole
                        )
                        _store_part(last, target, columns, one)


@njit
def _store_part(values: Any, target: Any, columns: Any, like: Any) -> None:
    stored = carray(target, columns)
    for i in range(columns):
        stored[i] = to_storage(values[i], like)


# Not in a closure, whose compiled functions numba takes for others in each process, and would never find on disk.
_multiply_pairs: Any = make_pair_product() if multiplies_bfloat16() else None


def _pair_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 14)
    items, rows, inputs, outputs = a[1], a[3], a[4], a[5]
    x, x_stride, weights, out, bias = a[6], a[7], a[8], a[9], float32_pointer(a[10])
    chunks, chunk_rows, panels_each = a[11], a[12], a[13]
    panels = (outputs + PANEL - 1) // PANEL
    sums, last = np.empty((ROWS, PANEL), np.float32), np.empty(PANEL, np.float32)
    one = carray(storage_pointer(block, out), 1)[0]
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
            packed, columns = int32_pointer(weights + column * inputs * 2), min(PANEL, outputs - column)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                units = int32_pointer(x + top * x_stride)
                place = float32_pointer(sums.ctypes.data)
                _multiply_pairs(bottom - top, units, x_stride // 4, packed, inputs // PAIR_UNIT, place)
                for row in range(top, bottom):
                    own = float32_pointer(sums.ctypes.data + (row - top) * PANEL * 4)
                    target = storage_pointer(block, out + (row * outputs + column) * 2)
                    if columns == PANEL:
                        store_row(own, advance(bias, column), target)
                    else:
                        store_row(own, advance(bias, column), float32_pointer(last.ctypes.data))
                        _store_part(last, target, columns, one)


_INT8 = Worker(_int8_worker)
_PAIRS = None if _multiply_pairs is None else Worker(_pair_worker)


def supports_bfloat16() -> bool:
    return _PAIRS is not None


def multiplies_bytes() -> bool:
    return byte_products() != "none"


def int8_linear(x: Tensor, weights: Int8Weights) -> Tensor:
    rows, outputs = x.shape[0], weights.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype)
    if not out.numel():
        return out
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
    if _PAIRS is None:
        raise UnsupportedDeviceError("bfloat16_linear: this CPU lacks AVX512-BF16; ask supports_bfloat16 first")
    rows, outputs = x.shape[0], weights.outputs
    out = torch.empty((rows, outputs), dtype=x.dtype)
    if not out.numel():
        return out
    cut = _cut(rows, weights.inputs, outputs, torch.get_num_threads())
    arguments = (
        rows,
        weights.inputs,
        outputs,
        x.data_ptr(),
        x.stride(0) * x.element_size(),
        weights.panels.data_ptr(),
        out.data_ptr(),
        weights.bias.data_ptr(),
        cut.chunks,
        cut.chunk_rows,
        cut.panels,
    )
    launch(_PAIRS, x.dtype, cut.items, arguments, parallel=cut.parallel)
    return out
