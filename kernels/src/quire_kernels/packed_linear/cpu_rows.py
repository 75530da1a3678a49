"""Code shared by the vector workers and the tile workers: quantization of activations and storage of results."""

from typing import Any

import numpy as np
from numba import carray, njit

from quire_kernels.cpu_runtime.dot_tiles import PANEL, advance
from quire_kernels.cpu_runtime.scalars import (
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

QUANTISED = 3
"""The place in an int8 worker's argument block that counts items of quantized rows."""
PANEL_UNIT_BYTES = PANEL * 4


@njit
def quantise(
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
    """Quantize a row to levels q from 0 to 255, so that x is approximately scale * (q - zero).

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
    # NaN or infinity among the activations makes the scale, and with it the row's results, NaN or infinity.
    scales[row] = (high - low) / np.float32(255.0)
    zeros[row] = zero


@njit
def store_bytes(
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
    """Store a row's ``columns`` of a panel from integer sums. The last panel may have fewer than 32.

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
def store_sums(block: Any, sums: Any, bias: Any, column: Any, columns: Any, last: Any, target: Any) -> None:
    """Store a row's ``columns`` of a panel from float32 sums."""
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
