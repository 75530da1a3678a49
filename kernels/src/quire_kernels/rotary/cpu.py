"""rotary on a CPU. Each work item is one token."""

from typing import Any

from numba import carray, njit
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    FAST,
    as_int64_pointer,
    fetch_add,
    float32_pointer,
    int64_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)

# Below this many elements, waking a second thread costs more than it saves.
_PARALLEL_ELEMENTS = 1 << 16


@njit(fastmath=FAST)
def rotate_head(head: Any, cos_sin: Any, half: Any) -> None:
    """Rotate one head vector in place; ``cos_sin`` is the table's row for its position."""
    for i in range(half):
        first, second = to_float32(head[i]), to_float32(head[half + i])
        cos, sin = cos_sin[i], cos_sin[half + i]
        head[i] = to_storage(first * cos - second * sin, head[i])
        head[half + i] = to_storage(second * cos + first * sin, head[i])


def _rotary_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 12)
    items, heads, dim, x, token_bytes, head_bytes = a[1], a[3], a[4], a[5], a[6], a[7]
    table, width, table_rows = a[9], a[10], a[11]
    positions = carray(int64_pointer(a[8]), items)
    while True:
        token = fetch_add(counter, 0)
        if token >= items:
            break
        position = positions[token]
        if position < 0 or position >= table_rows:
            a[2] = 1
            break
        cos_sin = carray(float32_pointer(table + position * width * 4), width)
        for h in range(heads):
            head = carray(storage_pointer(block, x + token * token_bytes + h * head_bytes), dim)
            rotate_head(head, cos_sin, width // 2)


_WORKER = Worker(_rotary_worker)


def rotary(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    tokens, heads, dim = x.shape
    size = x.element_size()
    arguments = (
        heads,
        dim,
        x.data_ptr(),
        x.stride(0) * size,
        dim * size,
        positions.data_ptr(),
        cos_sin.data_ptr(),
        cos_sin.shape[1],
        cos_sin.shape[0],
    )
    if launch(_WORKER, x.dtype, tokens, arguments, parallel=x.numel() >= _PARALLEL_ELEMENTS):
        refuse("rotary", "positions", f"leave the table of {cos_sin.shape[0]} positions")
