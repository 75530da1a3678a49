"""The steps of attention between its two products, and after them.

They adjust the scores, turn them into weights, keep and merge partial results, and store the outputs.
"""

from typing import Any

import numpy as np
from numba import carray, njit

from quire_kernels.cpu_runtime.scalars import (
    FAST,
    exp_float32,
    float32_pointer,
    storage_pointer,
    tanh_float32,
    to_storage,
)
from quire_kernels.cpu_runtime.softmax import largest_score, weigh_scores


@njit(fastmath=FAST)
def cap_scores(scores: Any, scale: Any, soft_cap: Any) -> None:
    """Scale a row's visible scores and apply the soft cap."""
    for i in range(scores.size):
        scores[i] *= scale
    inverse = np.float32(1.0) / soft_cap
    for i in range(scores.size):
        scores[i] = soft_cap * tanh_float32(scores[i] * inverse)


@njit(fastmath=FAST)
def add_sinks(place: Any, group: Any, largest: Any, totals: Any, attended: Any) -> None:
    """Add one more score without a value to each row."""
    sinks = carray(float32_pointer(place), group)
    for r in range(attended.shape[0]):
        sink = sinks[r % group]
        grown = max(largest[r], sink)
        shrink = exp_float32(largest[r] - grown)
        totals[r] = totals[r] * shrink + exp_float32(sink - grown)
        for i in range(attended.shape[1]):
            attended[r, i] *= shrink


@njit(fastmath=False)
def weigh_row(
    block: Any, scores: Any, low: Any, high: Any, tokens: Any, scale: Any, largest: Any, total: Any, attended: Any
) -> tuple[Any, Any]:
    """Turn one row's scores[low:high] into weights exp(scale * score - largest), and its other ``tokens`` into 0.

    ``largest``, ``total`` and ``attended`` are the results of earlier pieces and are rescaled to the new largest score
    (online softmax, arXiv 1805.02867). Return the new largest score and sum of weights.
    """
    found = largest_score(scores.ctypes.data, low, high) * scale
    grown = found if found > largest else largest
    if grown > largest and total > np.float32(0.0):
        shrink = exp_float32(largest - grown)
        total *= shrink
        for i in range(attended.size):
            attended[i] *= shrink
    return grown, total + weigh_scores(block, scores.ctypes.data, low, high, tokens, scale, grown)


@njit(fastmath=FAST)
def store_outputs(
    block: Any, target: Any, row_bytes: Any, head_bytes: Any, group: Any, dim: Any, attended: Any, totals: Any
) -> None:
    for r in range(attended.shape[0]):
        place = target + (r // group) * row_bytes + (r % group) * head_bytes
        vector = carray(storage_pointer(block, place), dim)
        inverse = np.float32(1.0) / totals[r]
        for i in range(dim):
            vector[i] = to_storage(attended[r, i] * inverse, vector[i])


@njit(fastmath=FAST)
def keep_partial(place: Any, largest: Any, totals: Any, attended: Any) -> None:
    rows, dim = attended.shape
    partial = carray(float32_pointer(place), (rows, dim + 2))
    for r in range(rows):
        partial[r, 0], partial[r, 1] = largest[r], totals[r]
        for i in range(dim):
            partial[r, 2 + i] = attended[r, i]


@njit(fastmath=FAST)
def merge_partials(place: Any, count: Any, piece_floats: Any, all_largest: Any, totals: Any, attended: Any) -> None:
    """Merge the partial results of a tile's rows; the results of each piece are ``piece_floats`` apart."""
    rows, dim = attended.shape
    for r in range(rows):
        partials = carray(float32_pointer(place + r * (dim + 2) * 4), (count - 1) * piece_floats + dim + 2)
        largest = np.float32(-np.inf)
        for piece in range(count):
            largest = max(largest, partials[piece * piece_floats])
        total = np.float32(0.0)
        attended[r] = np.float32(0.0)
        for piece in range(count):
            base = piece * piece_floats
            if partials[base + 1] != np.float32(0.0):  # The comparison is also true for NaN.
                share = exp_float32(partials[base] - largest)
                total += share * partials[base + 1]
                for i in range(dim):
                    attended[r, i] += share * partials[base + 2 + i]
        totals[r] = total
        all_largest[r] = largest
