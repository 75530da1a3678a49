"""swap_blocks on a CPU. Each work item is one block of one layer's keys or values, which is dense."""

from collections.abc import Sequence
from typing import Any

import torch
from numba import carray
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import as_int64_pointer, copy_bytes, fetch_add, int64_pointer
from quire_kernels.kv_cache import KVCache

# Below this many bytes, waking a second thread costs more than it saves.
_PARALLEL_BYTES = 1 << 20


def _swap_blocks_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 8)
    items, copies, buffers = a[1], a[3], a[4]
    source_blocks, target_blocks = carray(int64_pointer(a[6]), copies), carray(int64_pointer(a[7]), copies)
    table = carray(int64_pointer(a[5]), buffers * 3)  # per buffer: source, target, bytes of a block
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        buffer, copy = item // copies * 3, item % copies
        size = table[buffer + 2]
        source, target = table[buffer] + source_blocks[copy] * size, table[buffer + 1] + target_blocks[copy] * size
        copy_bytes(target, source, size)


_WORKER = Worker(_swap_blocks_worker)


def swap_blocks(
    sources: Sequence[KVCache], targets: Sequence[KVCache], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    rows = []
    for source, target in zip(sources, targets, strict=True):
        for taken, given in ((source.keys, target.keys), (source.values, target.values)):
            rows.append((taken.data_ptr(), given.data_ptr(), taken.stride(0) * taken.element_size()))
    table = torch.tensor(rows)  # [2L, 3] int64
    copies = source_blocks.numel()
    arguments = (copies, len(rows), table.data_ptr(), source_blocks.data_ptr(), target_blocks.data_ptr())
    total = copies * sum(size for _, _, size in rows)
    # The bytes are copied unchanged, so one compiled worker serves every dtype.
    launch(_WORKER, torch.float32, copies * len(rows), arguments, parallel=total >= _PARALLEL_BYTES)
