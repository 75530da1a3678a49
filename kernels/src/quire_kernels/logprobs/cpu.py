"""Log-probabilities on a CPU. Each work item is one row.

A row needs three passes, and a fourth one that skips parts without probable tokens.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    FAST,
    as_int64_pointer,
    exp_float32,
    fetch_add,
    float32_pointer,
    int64_pointer,
    largest_of,
    storage_pointer,
    to_float32,
)
from quire_kernels.logprobs import Logprobs

# Below this many logits, waking a second thread costs more than it saves.
_PARALLEL_LOGITS = 1 << 15
_PART = 128


@njit(fastmath=FAST)
def _log_of_sum(logits: Any, largest: Any) -> Any:
    total = 0.0
    for i in range(logits.size):
        total += np.float64(exp_float32(to_float32(logits[i]) - largest))
    return np.log(total)


@njit(fastmath=FAST)
def _count_above(logits: Any, value: Any) -> Any:
    count = 0
    for i in range(logits.size):
        count += 1 if to_float32(logits[i]) > value else 0
    return count


@njit
def _take_likeliest(logits: Any, ids: Any, values: Any) -> None:
    """Fill ``ids`` and ``values`` by insertion; skip a part without a logit above the smallest that is kept."""
    most = ids.size
    values[:] = np.float32(-np.inf)
    kept = 0
    for begin in range(0, logits.size, _PART):
        end = min(logits.size, begin + _PART)
        if kept == most and largest_of(logits[begin:end]) <= values[most - 1]:
            continue
        for i in range(begin, end):
            value = to_float32(logits[i])
            if kept == most and not value > values[most - 1]:
                continue
            place = kept if kept < most else most - 1
            while place > 0 and value > values[place - 1]:
                values[place], ids[place] = values[place - 1], ids[place - 1]
                place -= 1
            values[place], ids[place] = value, i
            kept = min(kept + 1, most)


def _logprobs_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 13)
    items, vocabulary, most = a[1], a[3], a[8]
    lines, token_ids = carray(int64_pointer(a[6]), items), carray(int64_pointer(a[7]), items)
    of_token, rank = carray(float32_pointer(a[9]), items), carray(int64_pointer(a[10]), items)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        logits = carray(storage_pointer(block, a[4] + lines[item] * a[5]), vocabulary)
        largest = largest_of(logits)
        log_of_sum = _log_of_sum(logits, largest)
        value = to_float32(logits[token_ids[item]])
        # In float32, the sum of a large logit and a small logarithm would be rounded to the former.
        log_of_sum += np.float64(largest)
        of_token[item] = np.float32(np.float64(value) - log_of_sum)
        rank[item] = _count_above(logits, value) + 1
        if most > 0:
            values = carray(float32_pointer(a[12] + item * most * 4), most)
            _take_likeliest(logits, carray(int64_pointer(a[11] + item * most * 8), most), values)
            for k in range(most):
                values[k] = np.float32(np.float64(values[k]) - log_of_sum)


_LOGPROBS = Worker(_logprobs_worker)


def token_logprobs(logits: Tensor, lines: Tensor, token_ids: Tensor, most: int) -> Logprobs:
    rows, vocabulary = lines.shape[0], logits.shape[1]
    made = Logprobs(
        of_token=torch.empty(rows, dtype=torch.float32),
        rank=torch.empty(rows, dtype=torch.int64),
        token_ids=torch.empty((rows, most), dtype=torch.int64),
        logprobs=torch.empty((rows, most), dtype=torch.float32),
    )
    arguments = (
        vocabulary,
        logits.data_ptr(),
        logits.stride(0) * logits.element_size(),
        lines.data_ptr(),
        token_ids.data_ptr(),
        most,
        made.of_token.data_ptr(),
        made.rank.data_ptr(),
        made.token_ids.data_ptr(),
        made.logprobs.data_ptr(),
    )
    launch(_LOGPROBS, logits.dtype, rows, arguments, parallel=rows * vocabulary >= _PARALLEL_LOGITS)
    return made
