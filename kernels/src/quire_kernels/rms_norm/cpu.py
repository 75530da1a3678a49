"""rms_norm on a CPU: one pass to add and square, one to scale.

A work item is a few adjacent rows, so that threads seldom meet at the counter of items or in one page.
"""

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, empty, float_bits, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    fetch_add,
    float_from_bits,
    storage_pointer,
    to_float32,
    to_storage,
)

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 16
_ITEM_ELEMENTS = 1 << 14


def _rms_norm_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 13)
    items, width, x_stride, residual_stride, eps = a[1], a[3], a[6], a[8], float_from_bits(a[9])
    rows, rows_each = a[11], a[12]
    weight = carray(storage_pointer(block, a[5]), width)
    one = weight[0]
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        for row in range(item * rows_each, min(rows, (item + 1) * rows_each)):
            x = carray(storage_pointer(block, a[4] + row * x_stride), width)
            out = carray(storage_pointer(block, a[10] + row * width * weight.itemsize), width)
            total = np.float32(0.0)
            if a[7] != 0:
                residual = carray(storage_pointer(block, a[7] + row * residual_stride), width)
                for i in range(width):
                    rounded = to_storage(to_float32(x[i]) + to_float32(residual[i]), one)
                    residual[i] = rounded
                    value = to_float32(rounded)
                    total += value * value
                x = residual
            else:
                for i in range(width):
                    value = to_float32(x[i])
                    total += value * value
            scale = np.float32(1.0 / np.sqrt(np.float64(total) / width + eps))
            for i in range(width):
                out[i] = to_storage(to_float32(x[i]) * scale * to_float32(weight[i]), one)


_WORKER = Worker(_rms_norm_worker)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None) -> Tensor:
    rows, width = x.shape
    out = empty((rows, width), x.dtype)
    size = x.element_size()
    rows_each = max(1, min(_ITEM_ELEMENTS // width, rows // (4 * torch.get_num_threads())))
    arguments = (
        width,
        x.data_ptr(),
        weight.data_ptr(),
        x.stride(0) * size,
        0 if residual is None else residual.data_ptr(),
        0 if residual is None else residual.stride(0) * size,
        float_bits(eps),
        out.data_ptr(),
        rows,
        rows_each,
    )
    parallel = rows * width >= _PARALLEL_ELEMENTS
    keeps = (x, weight, residual, out)
    launch(_WORKER, x.dtype, -(-rows // rows_each), arguments, parallel=parallel, keeps=keeps)
    return out
