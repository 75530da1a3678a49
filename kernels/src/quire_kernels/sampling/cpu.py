"""Sampling on a CPU, without a sort. Each work item is one row.

The last token that top-k or top-p keeps is found by radix selection on the bits of the weights, because non-negative
floats have the same order as their bits: a histogram over the upper bits, then over the next bits of the one bin that
contains the boundary.
"""

from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from quire_kernels.cpu_runtime import Worker, empty, launch
from quire_kernels.cpu_runtime.scalars import (
    FAST,
    as_int64_pointer,
    bits_of_float32,
    exp_float32,
    fetch_add,
    float32_pointer,
    int64_pointer,
    largest_of,
    storage_pointer,
    to_float32,
)

# Below this many logits, waking a second thread costs more than it saves.
_PARALLEL_LOGITS = 1 << 15
_BINS = 1024
_SUM_LENGTH = 256
_PART = 1024
_LARGEST_FLOAT32 = np.finfo(np.float32).max


@njit
def _uniform(seed: Any, position: Any) -> Any:
    """Return a number in [0, 1) for a seed and a position; see ``reference.uniform``."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = np.uint64(position) & mask, np.uint64(position) >> shift, np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & mask, np.uint64(seed) >> shift
    for _ in range(10):
        first, second = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & mask, (first >> shift) ^ c3 ^ k1, first & mask
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
    return np.float64((c0 << np.uint64(21)) ^ (c1 >> np.uint64(11))) * 2.0**-53


@njit
def _boundary(values: Any, count: Any, target: Any, by_mass: Any, scratch: Any, totals: Any) -> Any:
    """Return the smallest kept value of values[:count] if the largest are kept until they reach ``target``.

    ``target`` is their sum if ``by_mass``, else their number. ``scratch`` may be ``values`` itself, which is then
    overwritten.
    """
    reached = 0.0
    prefix = np.uint32(0)
    for level in range(3):
        shift = np.uint32(20 - 10 * level)
        for b in range(_BINS):
            totals[b] = 0.0
        for i in range(count):
            b = (bits_of_float32(values[i]) >> shift) & np.uint32(_BINS - 1)
            totals[b] += np.float64(values[i]) if by_mass else 1.0
        chosen = 0
        for b in range(_BINS - 1, -1, -1):
            if totals[b] > 0.0:
                chosen = b
                if reached + totals[b] >= target:
                    break
                reached += totals[b]
        prefix = prefix | (np.uint32(chosen) << shift)
        remaining = 0
        for i in range(count):
            if (bits_of_float32(values[i]) >> shift) & np.uint32(_BINS - 1) == np.uint32(chosen):
                scratch[remaining] = values[i]
                remaining += 1
        values = scratch
        count = remaining
    return values[0]


@njit
def _inverse(temperature: Any) -> Any:
    """Return 1 / temperature, but finite.

    With a subnormal temperature, the largest logit's distance of 0 would become NaN.
    """
    return min(np.float32(1.0) / temperature, _LARGEST_FLOAT32)


@njit(fastmath=FAST)
def _weigh(logits: Any, temperature: Any, weights: Any) -> Any:
    """Compute weights[i] = exp((logits[i] - largest) / temperature), and return their sum."""
    largest = largest_of(logits)
    inverse = _inverse(temperature)
    total = 0.0
    for i in range(logits.size):
        weights[i] = exp_float32((logits[i] - largest) * inverse)
        total += np.float64(weights[i])
    return total


@njit
def _threshold(weights: Any, total: Any, top_k: Any, top_p: Any, min_p: Any, kept: Any, totals: Any) -> Any:
    """Return the smallest weight that may be sampled. The largest weight is 1."""
    floor = np.float32(min_p)
    vocabulary = weights.size
    if top_k < vocabulary:
        floor = max(floor, _boundary(weights, vocabulary, np.float64(top_k), False, kept, totals))
    if top_p >= np.float32(1.0):
        return floor
    if floor <= np.float32(0.0):
        return _boundary(weights, vocabulary, np.float64(top_p) * total, True, kept, totals)
    count = 0
    mass = 0.0
    for i in range(vocabulary):
        if weights[i] >= floor:
            kept[count] = weights[i]
            mass += np.float64(weights[i])
            count += 1
    return _boundary(kept, count, np.float64(top_p) * mass, True, kept, totals)


@njit(fastmath=FAST)
def _mean_information(logits: Any, weights: Any, floor: Any, largest: Any, inverse: Any) -> Any:
    """Return the mean of (logit - largest) / temperature over the tokens that may be sampled, and their mass.

    The mean is weighted; it is the entropy less a constant.
    """
    total, mass = 0.0, 0.0
    for i in range(weights.size):
        # A weight of 0 may belong to a logit of minus infinity, which would make the product NaN.
        weight = np.float64(weights[i]) if weights[i] >= floor and weights[i] > np.float32(0.0) else 0.0
        height = (logits[i] - largest) * inverse if weight > 0.0 else np.float32(0.0)
        total += weight * np.float64(height)
        mass += weight
    return total / mass, mass


@njit
def _keep_typical(
    logits: Any, temperature: Any, typical_p: Any, floor: Any, weights: Any, distances: Any, totals: Any
) -> None:
    """Set all weights to 0 except those at or above ``floor`` whose information is nearest to their mean.

    The maximum distance is found like the smallest value in ``_boundary``: by radix selection, from small distances up.
    """
    largest = largest_of(logits)
    inverse = _inverse(temperature)
    mean, mass = _mean_information(logits, weights, floor, largest, inverse)
    for i in range(weights.size):
        kept = weights[i] >= floor and weights[i] > np.float32(0.0)
        # Weights above 0 belong to heights above -88: an exact 128th of a distance has no bits beyond those compared.
        distance = abs((logits[i] - largest) * inverse - np.float32(mean)) * np.float32(1.0 / 128.0)
        distances[i] = distance if kept else np.float32(np.inf)
    target = np.float64(typical_p) * mass
    reached = 0.0
    prefix, known = np.uint32(0), np.uint32(0)
    for level in range(3):
        shift = np.uint32(20 - 10 * level)
        for b in range(_BINS):
            totals[b] = 0.0
        for i in range(weights.size):
            bits = bits_of_float32(distances[i])
            if bits & known == prefix and distances[i] < np.float32(np.inf):
                totals[(bits >> shift) & np.uint32(_BINS - 1)] += np.float64(weights[i])
        chosen = 0
        for b in range(_BINS):
            if totals[b] > 0.0:
                chosen = b
                if reached + totals[b] >= target:
                    break
                reached += totals[b]
        prefix = prefix | (np.uint32(chosen) << shift)
        known = known | (np.uint32(_BINS - 1) << shift)
    for i in range(weights.size):
        if bits_of_float32(distances[i]) > prefix:
            weights[i] = np.float32(0.0)


@njit
def _invert(weights: Any, floor: Any, uniform: Any, sums: Any) -> Any:
    """Return the first token at which the cumulative weight exceeds ``uniform`` of the total.

    Only weights at or above ``floor`` count.
    """
    vocabulary = weights.size
    total = 0.0
    for part in range(sums.size):
        sums[part] = 0.0
        for i in range(part * _SUM_LENGTH, min(vocabulary, (part + 1) * _SUM_LENGTH)):
            if weights[i] >= floor:
                sums[part] += np.float64(weights[i])
        total += sums[part]
    target = uniform * total
    before = 0.0
    part = 0
    while part + 1 < sums.size and before + sums[part] <= target:
        before += sums[part]
        part += 1
    last = 0
    within = 0.0
    for i in range(part * _SUM_LENGTH, vocabulary):
        if weights[i] >= floor and weights[i] > np.float32(0.0):
            last = i
            within += np.float64(weights[i])
            if before + within > target:
                break
    return last


def _sample_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 14)
    items, vocabulary, logits, row_bytes = a[1], a[3], a[4], a[5]
    temperature = carray(float32_pointer(a[6]), items)
    top_k = carray(int64_pointer(a[7]), items)
    top_p = carray(float32_pointer(a[8]), items)
    min_p = carray(float32_pointer(a[9]), items)
    typical_p = carray(float32_pointer(a[10]), items)
    seeds = carray(int64_pointer(a[11]), items)
    positions = carray(int64_pointer(a[12]), items)
    drawn = carray(int64_pointer(a[13]), items)
    weights = np.empty(vocabulary, dtype=np.float32)
    kept = np.empty(vocabulary, dtype=np.float32)
    totals = np.empty(_BINS, dtype=np.float64)
    sums = np.empty((vocabulary + _SUM_LENGTH - 1) // _SUM_LENGTH, dtype=np.float64)
    while True:
        row = fetch_add(counter, 0)
        if row >= items:
            break
        values = carray(storage_pointer(block, logits + row * row_bytes), vocabulary)
        if temperature[row] == np.float32(0.0):
            drawn[row] = _first_largest(values)
            continue
        total = _weigh(values, temperature[row], weights)
        floor = _threshold(weights, total, top_k[row], top_p[row], min_p[row], kept, totals)
        if typical_p[row] < np.float32(1.0) and total > 0.0:
            _keep_typical(values, temperature[row], typical_p[row], floor, weights, kept, totals)
        drawn[row] = _invert(weights, floor, _uniform(seeds[row], positions[row]), sums)


@njit
def _first_largest(values: Any) -> Any:
    """Return the index of the first maximum.

    The maximum of each part is a vector operation; only the best part is searched.
    """
    best, largest = 0, largest_of(values[:_PART])
    for begin in range(_PART, values.size, _PART):
        value = largest_of(values[begin : begin + _PART])
        if value > largest:
            best, largest = begin, value
    for i in range(best, min(values.size, best + _PART)):
        if to_float32(values[i]) == largest:
            return i
    return best


def _greedy_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 7)
    items, vocabulary, logits, row_bytes = a[1], a[3], a[4], a[5]
    drawn = carray(int64_pointer(a[6]), items)
    while True:
        row = fetch_add(counter, 0)
        if row >= items:
            break
        drawn[row] = _first_largest(carray(storage_pointer(block, logits + row * row_bytes), vocabulary))


_SAMPLE, _GREEDY = Worker(_sample_worker), Worker(_greedy_worker)


def greedy(logits: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    drawn = empty((rows,), torch.int64)
    arguments = (vocabulary, logits.data_ptr(), logits.stride(0) * logits.element_size(), drawn.data_ptr())
    parallel = logits.numel() >= _PARALLEL_LOGITS
    launch(_GREEDY, logits.dtype, rows, arguments, parallel=parallel, keeps=(logits, drawn))
    return drawn


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    rows, vocabulary = logits.shape
    drawn = torch.empty(rows, dtype=torch.int64)
    columns = (temperature, top_k, top_p, min_p, typical_p, seeds, positions, drawn)
    addresses = tuple(column.data_ptr() for column in columns)
    arguments = (vocabulary, logits.data_ptr(), logits.stride(0) * logits.element_size(), *addresses)
    launch(_SAMPLE, logits.dtype, rows, arguments, parallel=logits.numel() >= _PARALLEL_LOGITS)
    return drawn
