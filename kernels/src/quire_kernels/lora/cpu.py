"""Low-rank adapters on a CPU: one launch per layer, in which shrink and expand are two kinds of items.

The first C items shrink a block of tokens each; the others expand a block into some columns, and wait until every block
is shrunk. A product of few tokens takes less time than waking the threads twice. A row is multiplied alone, by vectors
along K and along N, so its bits do not depend on the other rows.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    await_count,
    fetch_add,
    float32_pointer,
    int32_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)
from quire_kernels.lora import LayerSlots, TokenGroups

# Below this many products, waking a second thread costs more than it saves.
_PARALLEL_PRODUCTS = 1 << 18
# Columns per item of expand: the rows of b that it reads, and the sums, stay in the nearest cache.
_COLUMNS = 512
# The place in the argument block that counts the blocks that are shrunk, and the ranks per pass over a row.
_SHRUNK = 3
_RANKS = 4


@njit
def _shrink(block: Any, wide: Any, a: Any, row: Any, inputs: Any, size: Any, shrunk: Any, to: Any, rank: Any) -> None:
    """Multiply a row, which is in ``wide``, by the first ``rank`` rows of ``a`` from row ``row`` on."""
    for r in range(0, rank, _RANKS):
        first = a + (row + r) * inputs * size
        a0 = carray(storage_pointer(block, first), inputs)
        a1 = carray(storage_pointer(block, first + inputs * size), inputs)
        a2 = carray(storage_pointer(block, first + 2 * inputs * size), inputs)
        a3 = carray(storage_pointer(block, first + 3 * inputs * size), inputs)
        s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
        for i in range(inputs):
            s0 += wide[i] * to_float32(a0[i])
            s1 += wide[i] * to_float32(a1[i])
            s2 += wide[i] * to_float32(a2[i])
            s3 += wide[i] * to_float32(a3[i])
        shrunk[to + r], shrunk[to + r + 1], shrunk[to + r + 2], shrunk[to + r + 3] = s0, s1, s2, s3


@njit
def _expand(
    block: Any, sums: Any, b: Any, outputs: Any, size: Any, shrunk: Any, at: Any, rank: Any, target: Any, count: Any
) -> None:
    """Add to ``count`` outputs at ``target`` the products of a row's ``rank`` numbers and the rows of ``b``."""
    for i in range(count):
        sums[i] = np.float32(0.0)
    step = outputs * size
    for r in range(0, rank, _RANKS):
        h0, h1, h2, h3 = shrunk[at + r], shrunk[at + r + 1], shrunk[at + r + 2], shrunk[at + r + 3]
        b0 = carray(storage_pointer(block, b + r * step), count)
        b1 = carray(storage_pointer(block, b + (r + 1) * step), count)
        b2 = carray(storage_pointer(block, b + (r + 2) * step), count)
        b3 = carray(storage_pointer(block, b + (r + 3) * step), count)
        for i in range(count):
            low = h0 * to_float32(b0[i]) + h1 * to_float32(b1[i])
            sums[i] += low + (h2 * to_float32(b2[i]) + h3 * to_float32(b3[i]))
    y = carray(storage_pointer(block, target), count)
    for i in range(count):
        y[i] = to_storage(to_float32(y[i]) + sums[i], y[i])


def _worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    v = carray(counter, 23)
    items, shrinking, inputs, outputs, largest, parts = v[1], v[4], v[5], v[6], v[7], v[8]
    source, source_stride, target, target_stride = v[9], v[10], v[11], v[12]
    a, b, size, column_items = v[13], v[14], v[15], v[16]
    ranks, ends = carray(int32_pointer(v[17]), v[21] * parts), carray(int32_pointer(v[18]), parts)
    order, blocks = int32_pointer(v[19]), carray(int32_pointer(v[20]), shrinking * 3)
    shrunk = float32_pointer(v[22])
    wide = np.empty(max(inputs, _COLUMNS), np.float32)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        expands = item >= shrinking
        which = (item - shrinking) // column_items if expands else item
        begin = (item - shrinking) % column_items * _COLUMNS if expands else np.int64(0)
        if expands:
            await_count(counter, _SHRUNK, shrinking)
        slot = np.int64(blocks[which * 3])
        for place in range(blocks[which * 3 + 1], blocks[which * 3 + 2] if slot >= 0 else blocks[which * 3 + 1]):
            token = np.int64(order[place])
            if not expands:
                x = carray(storage_pointer(block, source + token * source_stride), inputs)
                for i in range(inputs):
                    wide[i] = to_float32(x[i])
            part_begin = np.int64(0)
            for part in range(parts):
                rank = ranks[slot * parts + part]
                at = (np.int64(place) * parts + part) * largest
                low, high = max(begin, part_begin), min(begin + _COLUMNS, np.int64(ends[part]))
                part_begin = np.int64(ends[part])
                if not expands:
                    _shrink(block, wide, a, (slot * parts + part) * largest, inputs, size, shrunk, at, rank)
                elif rank > 0 and low < high:
                    rows = b + (slot * largest * outputs + low) * size
                    to = target + token * target_stride + low * size
                    _expand(block, wide, rows, outputs, size, shrunk, at, rank, to, high - low)
        if not expands:
            fetch_add(counter, _SHRUNK)


_ADD_ADAPTERS = Worker(_worker)


def add_adapters(y: Tensor, x: Tensor, layer: LayerSlots, groups: TokenGroups) -> None:
    blocks, tokens = groups.blocks.shape[0], groups.order.shape[0]
    if not blocks or not tokens:
        return
    slots, largest, outputs = layer.b.shape
    parts, inputs, size = layer.ends.shape[0], x.shape[1], x.element_size()
    shrunk = torch.empty(tokens * parts * largest, dtype=torch.float32)
    column_items = -(-outputs // _COLUMNS)
    arguments = (
        0,
        blocks,
        inputs,
        outputs,
        largest,
        parts,
        x.data_ptr(),
        x.stride(0) * size,
        y.data_ptr(),
        y.stride(0) * size,
        layer.a.data_ptr(),
        layer.b.data_ptr(),
        size,
        column_items,
        layer.ranks.data_ptr(),
        layer.ends.data_ptr(),
        groups.order.data_ptr(),
        groups.blocks.data_ptr(),
        slots,
        shrunk.data_ptr(),
    )
    items = blocks * (1 + column_items)
    products = tokens * parts * largest * (inputs + outputs)
    launch(_ADD_ADAPTERS, y.dtype, items, arguments, parallel=products >= _PARALLEL_PRODUCTS)
