"""Logit shaping on a CPU. Each work item is one row, and visits the ids that the row names, not the vocabulary."""

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, launch
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    fetch_add,
    float32_pointer,
    int32_pointer,
    int64_pointer,
)
from quire_kernels.logit_shaping import NUM_BOUNDS, TAIL, LogitEdits

# Below this many rows, waking a second thread costs more than it saves.
_PARALLEL_ROWS = 16
_FORBIDDEN = np.float32(-np.inf)


@njit
def _keep_only(logits: Any, ids: Any, begin: Any, end: Any) -> None:
    """Forbid all tokens between the ids, which are in ascending order."""
    place = 0
    for k in range(begin, end):
        logits[place : ids[k]] = _FORBIDDEN
        place = ids[k] + 1
    logits[place:] = _FORBIDDEN


@njit
def _forbid_words(logits: Any, ids: Any, begin: Any, end: Any, drawn: Any, tail: Any) -> None:
    place = begin
    while place < end:
        count = ids[place]
        last = place + count
        matches = drawn >= count - 1
        back = 1
        while matches and back < count:
            matches = tail[(drawn - back) % TAIL] == ids[last - back]
            back += 1
        if matches:
            logits[ids[last]] = _FORBIDDEN
        place = last + 1


@njit
def _penalise(logits: Any, ids: Any, counts: Any, begin: Any, end: Any, penalties: Any) -> None:
    repetition, frequency, presence = penalties[0], penalties[1], penalties[2]
    for k in range(begin, end):
        value = logits[ids[k]]
        value = value / repetition if value > np.float32(0.0) else value * repetition
        value -= frequency * counts[k]
        if counts[k] > np.float32(0.0):
            value -= presence
        logits[ids[k]] = value


def _shape_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 16)
    items, vocabulary, row_bytes, places = a[1], a[3], a[5], a[15]
    lines, rows = carray(int64_pointer(a[6]), items), carray(int64_pointer(a[7]), items)
    ids, values = carray(int32_pointer(a[8]), places), carray(float32_pointer(a[9]), places)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        row = rows[item]
        logits = carray(float32_pointer(a[4] + lines[item] * row_bytes), vocabulary)
        bounds = carray(int64_pointer(a[10] + row * NUM_BOUNDS * 8), NUM_BOUNDS)
        min_tokens = carray(int64_pointer(a[12] + row * 8), 1)[0]
        drawn = carray(int64_pointer(a[13] + row * 8), 1)[0]
        if bounds[1] > bounds[0]:
            _keep_only(logits, ids, bounds[0], bounds[1])
        _forbid_words(logits, ids, bounds[1], bounds[2], drawn, carray(int32_pointer(a[14] + row * TAIL * 4), TAIL))
        if drawn < min_tokens:
            for k in range(bounds[2], bounds[3]):
                logits[ids[k]] = _FORBIDDEN
        for k in range(bounds[3], bounds[4]):
            logits[ids[k]] += values[k]
        _penalise(logits, ids, values, bounds[4], bounds[5], carray(float32_pointer(a[11] + row * 12), 3))


def _count_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 11)
    items, places = a[1], a[10]
    token_ids, rows = carray(int64_pointer(a[3]), items), carray(int64_pointer(a[4]), items)
    ids, counts = carray(int32_pointer(a[5]), places), carray(float32_pointer(a[6]), places)
    while True:
        item = fetch_add(counter, 0)
        if item >= items:
            break
        row, token = rows[item], token_ids[item]
        bounds = carray(int64_pointer(a[7] + row * NUM_BOUNDS * 8), NUM_BOUNDS)
        drawn = carray(int64_pointer(a[8] + row * 8), 1)
        tail = carray(int32_pointer(a[9] + row * TAIL * 4), TAIL)
        begin, end, room = bounds[4], bounds[5], bounds[6]
        if room > begin:
            place = _find(ids, begin, end, np.int32(token))
            if place < end:
                counts[place] += np.float32(1.0)
            elif end < room:
                ids[end], counts[end] = np.int32(token), np.float32(1.0)
                bounds[5] = end + 1
            else:
                a[2] = 1
        tail[drawn[0] % TAIL] = np.int32(token)
        drawn[0] += 1


@njit
def _find(ids: Any, begin: Any, end: Any, token: Any) -> Any:
    """Return the position of a token, or ``end``.

    Each part is searched whole, because that is a vector operation and an early exit is not.
    """
    part = begin
    while part < end:
        stop = min(end, part + 256)
        found = end
        for k in range(part, stop):
            found = k if ids[k] == token else found
        if found < end:
            return found
        part = stop
    return end


_SHAPE, _COUNT = Worker(_shape_worker), Worker(_count_worker)


def shape_logits(logits: Tensor, lines: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    arguments = (
        logits.shape[1],
        logits.data_ptr(),
        logits.stride(0) * 4,
        lines.data_ptr(),
        rows.data_ptr(),
        edits.ids.data_ptr(),
        edits.values.data_ptr(),
        edits.bounds.data_ptr(),
        edits.penalties.data_ptr(),
        edits.min_tokens.data_ptr(),
        edits.num_drawn.data_ptr(),
        edits.tails.data_ptr(),
        edits.ids.shape[0],
    )
    launch(_SHAPE, torch.float32, rows.shape[0], arguments, parallel=rows.shape[0] >= _PARALLEL_ROWS)


def count_tokens(token_ids: Tensor, rows: Tensor, edits: LogitEdits) -> bool:
    columns = (token_ids, rows, edits.ids, edits.values, edits.bounds, edits.num_drawn, edits.tails)
    arguments = (*(column.data_ptr() for column in columns), edits.ids.shape[0])
    fault = launch(_COUNT, torch.float32, rows.shape[0], arguments, parallel=rows.shape[0] >= _PARALLEL_ROWS)
    return fault == 0
