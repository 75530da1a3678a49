"""Gated activations on a CPU.

A work item is a few adjacent rows, so that threads seldom meet at the counter of items or in one page.
"""

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, empty, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    exp_float32,
    fetch_add,
    storage_pointer,
    tanh_float32,
    to_float32,
    to_storage,
)

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 15
_ITEM_ELEMENTS = 1 << 13


def _silu_and_mul_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 10)
    items, width, source, row_bytes, target, element_bytes = a[1], a[3], a[4], a[5], a[6], a[7]
    rows, rows_each = a[8], a[9]
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
            gate = carray(storage_pointer(block, source + row * row_bytes), width)
            up = carray(storage_pointer(block, source + row * row_bytes + width * element_bytes), width)
            out = carray(storage_pointer(block, target + row * width * element_bytes), width)
            for i in range(width):
                x = to_float32(gate[i])
                silu = x / (np.float32(1.0) + exp_float32(-x))
                out[i] = to_storage(silu * to_float32(up[i]), gate[i])


def _gelu_tanh_and_mul_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 10)
    items, width, source, row_bytes, target, element_bytes = a[1], a[3], a[4], a[5], a[6], a[7]
    rows, rows_each = a[8], a[9]
    half, one = np.float32(0.5), np.float32(1.0)
    root, cubic = np.float32(0.7978845608028654), np.float32(0.044715)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
            gate = carray(storage_pointer(block, source + row * row_bytes), width)
            up = carray(storage_pointer(block, source + row * row_bytes + width * element_bytes), width)
            out = carray(storage_pointer(block, target + row * width * element_bytes), width)
            for i in range(width):
                x = to_float32(gate[i])
                gelu = half * x * (one + tanh_float32(root * (x + cubic * x * x * x)))
                out[i] = to_storage(gelu * to_float32(up[i]), gate[i])


_SILU_AND_MUL, _GELU_TANH_AND_MUL = Worker(_silu_and_mul_worker), Worker(_gelu_tanh_and_mul_worker)


def silu_and_mul(gate_up: Tensor) -> Tensor:
    return _run(_SILU_AND_MUL, gate_up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    return _run(_GELU_TANH_AND_MUL, gate_up)


def _run(worker: Worker, gate_up: Tensor) -> Tensor:
    rows, columns = gate_up.shape
    out = empty((rows, columns // 2), gate_up.dtype)
    size = gate_up.element_size()
    # Fewer rows than would fill the threads evenly are divided one by one.
    rows_each = max(1, min(2 * _ITEM_ELEMENTS // columns, rows // (4 * torch.get_num_threads())))
    arguments = (columns // 2, gate_up.data_ptr(), gate_up.stride(0) * size, out.data_ptr(), size, rows, rows_each)
    parallel = out.numel() >= _PARALLEL_ELEMENTS
    launch(worker, gate_up.dtype, -(-rows // rows_each), arguments, parallel=parallel, keeps=(gate_up, out))
    return out
