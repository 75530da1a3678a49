"""Packed linear layers with vectors of AVX2 or AVX-512.

For int8 the first items quantize the rows, and the others wait until all of them are done. This takes less time than a
second launch.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from quire_kernels.cpu_runtime import Worker
from quire_kernels.cpu_runtime.dot_tiles import (
    PANEL,
    ROWS,
    make_pair_product,
    multiply_bytes,
    multiply_floats,
    multiply_halves,
    prefetching,
)
from quire_kernels.cpu_runtime.features import multiplies_bfloat16
from quire_kernels.cpu_runtime.micro_kernel import is_in_pairs
from quire_kernels.cpu_runtime.scalars import as_int64_pointer, await_count, fetch_add, float32_pointer, int32_pointer
from quire_kernels.packed_linear import INT8_UNIT
from quire_kernels.packed_linear.cpu_rows import PANEL_UNIT_BYTES, QUANTISED, quantise, store_bytes, store_sums


@njit
def _following(panel: Any, last_panel: Any, panels: Any, first_of_next: Any) -> Any:
    """Return the panel that a thread probably multiplies after ``panel``, or the same one at the end.

    first_of_next  the first panel of the item that is its next one if the threads take turns
    """
    if panel + 1 < last_panel:
        return panel + 1
    return first_of_next if first_of_next < panels else panel


def _int8_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 23)
    items, rows, inputs, filled, outputs = a[1], a[4], a[5], a[6], a[7]
    x, x_stride, levels, weights, out, size = a[8], a[9], a[10], a[11], a[12], a[13]
    vectors = (int32_pointer(a[15]), float32_pointer(a[14]), float32_pointer(a[16]))
    quantising, rows_each, chunks, chunk_rows, panels_each, threads = a[17], a[18], a[19], a[20], a[21], a[22]
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
                quantise(
                    block, x + row * x_stride, inputs, levels + row * filled, filled, filled, 1, scales, zeros, row
                )
            fetch_add(counter, QUANTISED)
            continue
        if not is_ready:
            await_count(counter, QUANTISED, quantising)
            is_ready = True
        first_panel, chunk = (item - quantising) // chunks * panels_each, (item - quantising) % chunks
        begin = chunk * chunk_rows
        count = min(rows, begin + chunk_rows) - begin
        tiles, depth = (count + ROWS - 1) // ROWS, filled // INT8_UNIT
        last_panel = min(panels, first_panel + panels_each)
        for panel in range(first_panel, last_panel):
            column = panel * PANEL
            packed, columns = weights + column * filled, min(PANEL, outputs - column)
            following = _following(panel, last_panel, panels, (item - quantising + threads) // chunks * panels_each)
            ahead, pace = prefetching(count, tiles, PANEL_UNIT_BYTES, packed, weights + following * PANEL * filled)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                units, place = int32_pointer(levels + top * filled), int32_pointer(sums.ctypes.data)
                ahead = multiply_bytes(bottom - top, units, depth, int32_pointer(packed), depth, place, ahead, pace)
                for row in range(top, bottom):
                    found, target = sums.ctypes.data + (row - top) * PANEL * 4, out + (row * outputs + column) * size
                    store_bytes(block, found, zeros[row], scales[row], vectors, column, columns, last, target)


# This is not a closure, because numba never finds a compiled closure in its disk cache. Without pairs it is not used.
_multiply_pairs: Any = make_pair_product() if multiplies_bfloat16() else multiply_floats


@njit
def _multiply_rows(
    block: Any,
    halves: Any,
    rows: Any,
    a: Any,
    stride: Any,
    weights: Any,
    units: Any,
    c: Any,
    ahead: Any,
    pace: Any,
) -> Any:
    """Multiply a tile of rows by a panel: pairs of bfloat16, or float32 by float16 (``halves``) or float32."""
    if is_in_pairs(block):
        return _multiply_pairs(rows, a, stride, weights, units, c, ahead, pace)
    if halves:
        return multiply_halves(rows, a, stride, weights, units, c, ahead, pace)
    return multiply_floats(rows, a, stride, weights, units, c, ahead, pace)


def _vector_worker(block: Any) -> None:
    """Multiply rows without quantization; the sums are float32."""
    counter = as_int64_pointer(block)
    a = carray(counter, 17)
    items, rows, units, outputs = a[1], a[3], a[4], a[5]
    x, x_stride, weights, out, bias = a[6], a[7], a[8], a[9], float32_pointer(a[10])
    chunks, chunk_rows, panels_each, size, threads, halves = a[11], a[12], a[13], a[14], a[15], a[16] != 0
    unit_bytes = PANEL_UNIT_BYTES // 2 if halves else PANEL_UNIT_BYTES
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
        last_panel = min(panels, first_panel + panels_each)
        for panel in range(first_panel, last_panel):
            column = panel * PANEL
            packed = weights + panel * units * unit_bytes
            columns = min(PANEL, outputs - column)
            following = _following(panel, last_panel, panels, (item + threads) // chunks * panels_each)
            ahead, pace = prefetching(count, tiles, unit_bytes, packed, weights + following * units * unit_bytes)
            for part in range(tiles):
                top, bottom = begin + count * part // tiles, begin + count * (part + 1) // tiles
                ahead = _multiply_rows(
                    block,
                    halves,
                    bottom - top,
                    int32_pointer(x + top * x_stride),
                    x_stride // 4,
                    int32_pointer(packed),
                    units,
                    float32_pointer(sums.ctypes.data),
                    ahead,
                    pace,
                )
                for row in range(top, bottom):
                    found, target = sums.ctypes.data + (row - top) * PANEL * 4, out + (row * outputs + column) * size
                    store_sums(block, found, bias, column, columns, last, target)


INT8 = Worker(_int8_worker)
VECTORS = Worker(_vector_worker)
