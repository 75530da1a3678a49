"""Packed linear layers on a CPU: tiles of rows are multiplied by panels of weights.

Two implementations read the same panels: vectors of AVX2 or AVX-512 (``cpu_vectors``), and AMX's tiles (``cpu_tiles``).
A layer uses the same one for every number of rows, because tiles add in another order.

A work item is a few panels with all rows, or with one chunk of many rows: every weight is read from memory once, in
storage order.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.cpu_runtime import empty, launch
from quire_kernels.cpu_runtime.amx import may_use_tiles
from quire_kernels.cpu_runtime.dot_tiles import PANEL
from quire_kernels.cpu_runtime.features import byte_products, multiplies_bfloat16
from quire_kernels.cpu_runtime.tiles import ROW_BYTES, TILE_BYTES, TILE_ROWS, units_of_tile
from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.packed_linear import INT8_UNIT, BFloat16Weights, FloatWeights, Int8Weights
from quire_kernels.packed_linear.cpu_tiles import TILES
from quire_kernels.packed_linear.cpu_vectors import INT8, VECTORS

# Below this many products, waking a second thread costs more than it saves. Reading a weight costs as much as eight.
_PARALLEL_PRODUCTS = 1 << 20
_READ_PRODUCTS = 8
# Rows per item: many uses of a panel that was read, and still enough items for all threads.
_CHUNK_ROWS = 96
_ITEMS_PER_THREAD = 8
_MOST_PANELS = 8  # Panels per item of many rows; they stay in the nearer caches.

# With tiles, an item has as many rows as stay in the second-level cache while its panels pass. The part of a panel that
# is in use must fit into a nearest cache of 48 KiB.
_TILE_CHUNK_BYTES = 800 << 10
_LEAST_TILE_CHUNK_ROWS = 64
_TILE_STEPS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
    """The division of a product into items."""

    items: int
    chunks: int
    chunk_rows: int
    panels: int
    parallel: bool


@functools.lru_cache(maxsize=4096)  # A model has few layer sizes, and steps have few different numbers of rows.
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


def supports_bfloat16() -> bool:
    return multiplies_bfloat16()


def multiplies_bytes() -> bool:
    return byte_products() != "none"


def int8_linear(x: Tensor, weights: Int8Weights) -> Tensor:
    rows, outputs = x.shape[0], weights.outputs
    out = empty((rows, outputs), x.dtype)
    if not out.numel():
        return out
    if (units := _units_of_tile(weights.panels)) is not None:
        return _by_tiles(x, weights, units, out)
    filled = weights.panels.shape[1] * INT8_UNIT
    levels = empty((rows * (filled + 8),), torch.uint8)  # plus scale and zero point per row
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
        threads,
    )
    keeps = (x, weights, levels, out)
    launch(INT8, x.dtype, quantising + cut.items, arguments, parallel=cut.parallel, keeps=keeps)
    return out


def bfloat16_linear(x: Tensor, weights: BFloat16Weights) -> Tensor:
    if not multiplies_bfloat16():
        raise UnsupportedDeviceError("bfloat16_linear: this CPU lacks AVX512-BF16; check supports_bfloat16 first")
    rows, outputs = x.shape[0], weights.outputs
    out = empty((rows, outputs), x.dtype)
    if not out.numel():
        return out
    if (units := _units_of_tile(weights.panels)) is not None:
        return _by_tiles(x, weights, units, out)
    return _by_vectors(x, weights, out)


def float_linear(x: Tensor, weights: FloatWeights) -> Tensor:
    out = empty((x.shape[0], weights.outputs), x.dtype)
    if not out.numel():
        return out
    return _by_vectors(x, weights, out)


def _by_vectors(x: Tensor, weights: BFloat16Weights | FloatWeights, out: Tensor) -> Tensor:
    threads = torch.get_num_threads()
    cut = _cut(x.shape[0], weights.inputs, weights.outputs, threads)
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
        threads,
        int(weights.panels.dtype == torch.float16),
    )
    launch(VECTORS, x.dtype, cut.items, arguments, parallel=cut.parallel, keeps=(x, weights, out))
    return out


def _units_of_tile(panels: Tensor) -> int | None:
    """Return the number of units of K in a layer's tiles, or None if vectors multiply instead."""
    return units_of_tile(panels.shape[1]) if may_use_tiles() else None


def _by_tiles(x: Tensor, weights: Int8Weights | BFloat16Weights, units: int, out: Tensor) -> Tensor:
    assert TILES is not None
    rows, threads = x.shape[0], torch.get_num_threads()
    steps = weights.panels.shape[1] // units
    row_tiles = -(-rows // TILE_ROWS)
    # The buffer holds the rows in tiles and, for int8, a scale and a zero point per row.
    laid = empty((row_tiles * steps * TILE_BYTES + rows * 8,), torch.uint8)
    chunk_rows = max(_LEAST_TILE_CHUNK_ROWS, _TILE_CHUNK_BYTES // (steps * ROW_BYTES))
    cut = _cut(rows, weights.inputs, weights.outputs, threads, chunk_rows=chunk_rows)
    # A single pass over a panel needs no division into parts.
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
        threads,
        *(0,) * threads,
    )
    keeps = (x, weights, laid, out)
    launch(TILES, x.dtype, laying + cut.items, arguments, parallel=cut.parallel, keeps=keeps)
    return out


def _filled(count: int, unit: int) -> int:
    return -(-count // unit) * unit
