"""feed_back on a CPU: one work item, because a pass has few sequences."""

from typing import Any

import torch
from numba import carray
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import as_int64_pointer, int64_pointer
from quire_kernels.feed_back import Passes, PassInputs
from quire_kernels.paged_attention.cpu_plan import ENDS_ROW, NUM_TILES, PLAN_NUMBERS, TILES_AT


def _feed_back_worker(block: Any) -> None:
    a = carray(as_int64_pointer(block), 13)
    rows, most = a[3], a[4]
    sampled, token_ids = carray(int64_pointer(a[5]), rows), carray(int64_pointer(a[6]), rows)
    positions, slots = carray(int64_pointer(a[7]), rows), carray(int64_pointer(a[8]), rows)
    done = carray(int64_pointer(a[9]), 1)
    next_slots, all_sampled = carray(int64_pointer(a[10]), (most, rows)), carray(int64_pointer(a[11]), (most, rows))
    plan = carray(int64_pointer(a[12]), PLAN_NUMBERS)
    tiles = plan[NUM_TILES]
    ends = carray(int64_pointer(plan[TILES_AT] + 8 * ENDS_ROW * tiles), tiles)
    number = done[0]
    for row in range(rows):
        all_sampled[number, row] = token_ids[row] = sampled[row]
        positions[row] += 1
        if number + 1 < most:
            slots[row] = next_slots[number + 1, row]
    for tile in range(tiles):
        ends[tile] += 1
    done[0] = number + 1


_WORKER = Worker(_feed_back_worker)


def feed_back(sampled: Tensor, inputs: PassInputs, passes: Passes) -> None:
    most, rows = passes.slots.shape
    tensors = (sampled, inputs.token_ids, inputs.positions, inputs.slots, passes.done, passes.slots, passes.sampled)
    addresses = tuple(tensor.data_ptr() for tensor in tensors)
    arguments = (rows, most, *addresses, inputs.plan.numbers_address)
    launch(_WORKER, torch.float32, 1, arguments, parallel=False, keeps=(tensors, inputs.plan))
