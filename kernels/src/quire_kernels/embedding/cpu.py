"""embed on a CPU: a launch that can be recorded. A work item is a few tokens."""

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.cpu_runtime import Worker, empty, float_bits, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    fetch_add,
    float_from_bits,
    int64_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 16
_ITEM_ELEMENTS = 1 << 14


def _embed_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 12)
    items, width, vocabulary, tokens, tokens_each = a[1], a[3], a[4], a[9], a[10]
    token_ids = carray(int64_pointer(a[5]), tokens)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        for token in range(item * tokens_each, min(tokens, (item + 1) * tokens_each)):
            token_id = token_ids[token]
            if token_id < 0 or token_id >= vocabulary:
                a[2] = 1
                continue
            row = carray(storage_pointer(block, a[6] + token_id * a[7]), width)
            out = carray(storage_pointer(block, a[8] + token * width * row.itemsize), width)
            if a[11] == 0:
                out[:] = row
            else:
                scale = np.float32(float_from_bits(a[11]))
                for i in range(width):
                    out[i] = to_storage(to_float32(row[i]) * scale, row[0])


_WORKER = Worker(_embed_worker)


def embed(token_ids: Tensor, table: Tensor, scale: float | None, out: Tensor | None) -> Tensor:
    tokens, (vocabulary, width) = token_ids.shape[0], table.shape
    if out is None:
        out = empty((tokens, width), table.dtype)
    if not out.numel():
        return out
    tokens_each = max(1, min(_ITEM_ELEMENTS // width, tokens // (4 * torch.get_num_threads())))
    arguments = (
        width,
        vocabulary,
        token_ids.data_ptr(),
        table.data_ptr(),
        table.stride(0) * table.element_size(),
        out.data_ptr(),
        tokens,
        tokens_each,
        0 if scale is None else float_bits(scale),
    )

    def refuse_tokens(fault: int) -> None:
        refuse("embed", "token_ids", f"leave the table of {vocabulary} tokens")

    parallel = tokens * width >= _PARALLEL_ELEMENTS
    keeps = (token_ids, table, out)
    launch(
        _WORKER, table.dtype, -(-tokens // tokens_each), arguments, parallel=parallel, keeps=keeps, refuse=refuse_tokens
    )
    return out
