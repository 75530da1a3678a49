"""Device functions of the kernels of ``sampling`` and ``logprobs``: weights, kept tokens and boundaries of a row.

Two choices make the results independent of how a row is split over programs and tiles:

Weights are added as integers of 2^-44: exp(height) is at most 1 and a row has at most 2^18 of them, so int64 holds
every sum, and a sum of integers has no order. A weight below 2^-44 of the largest counts as 0.

Boundaries are searched among the logits, not among their weights: floats have the same order as their bits, so a
boundary is found exactly by halving an interval of integers, and equal logits fall on the same side.

Legend: height of a token = (logit - largest logit) / temperature; key = int32 with the same order as the logit.
"""

import triton
import triton.language as tl

NUM_PIVOTS: tl.constexpr = tl.constexpr(8)
LOWEST_KEY: tl.constexpr = tl.constexpr(-(1 << 31))
UNIT: tl.constexpr = tl.constexpr(2.0**44)
_MINUS_INFINITY: tl.constexpr = tl.constexpr(float("-inf"))
_LARGEST_FLOAT32: tl.constexpr = tl.constexpr(3.4028234663852886e38)


@triton.jit
def load_logits(row, tokens, end):
    """Load logits as float32; NaN and positions beyond ``end`` are minus infinity, and -0 becomes 0."""
    logits = tl.load(row + tokens, mask=tokens < end, other=_MINUS_INFINITY).to(tl.float32)
    logits = tl.where(logits == logits, logits, _MINUS_INFINITY)
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
def inverse_of(temperature):
    """Return 1 / temperature, but finite.

    With a subnormal temperature, the largest logit's distance of 0 would become NaN.
    """
    return tl.minimum(1.0 / temperature, _LARGEST_FLOAT32)


@triton.jit
def heights_of(logits, largest, inverse):
    """Return the heights of logits.

    The largest has 0 even if it is infinite; in a row of minus infinities all are minus infinity.
    """
    below = (logits - largest) * inverse
    return tl.where(logits == _MINUS_INFINITY, _MINUS_INFINITY, tl.where(logits == largest, 0.0, below))


@triton.jit
def units_of(heights):
    """Return exp(height) in whole units."""
    return (tl.exp(heights) * UNIT).to(tl.int64)


@triton.jit
def pivot_at(number):
    """Return the height of a survey's pivot, from -1 down to -15.875; it is exact, so it is the same everywhere."""
    number = number.to(tl.float32)
    return -(1.0 + 1.25 * number + 0.125 * number * number)


@triton.jit
def key_of(logits):
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def distance_key(heights, mean):
    """Return a key that is larger the nearer the height is to ``mean``."""
    return -(tl.abs(heights - mean).to(tl.int32, bitcast=True))


@triton.jit
def is_kept(logits, heights, lowest_height, lowest_key, mean, farthest):
    """Return whether a token may be sampled. ``farthest`` is a distance key.

    LOWEST_KEY and a lowest height of minus infinity exclude no token.
    """
    near = distance_key(heights, mean) >= farthest
    return (heights >= lowest_height) & (key_of(logits) >= lowest_key) & near & (heights > _MINUS_INFINITY)


@triton.jit
def boundary(
    row,
    size,
    largest,
    inverse,
    lowest_height,
    lowest_key,
    mean,
    target,
    BY_COUNT: tl.constexpr,
    BY_DISTANCE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the largest key such that the kept tokens at or above it reach ``target``.

    The target is a number of tokens or of units of weight.

    Keys are of logits, or of distances from ``mean``. The search halves the interval of the key and each time narrows
    its ends to keys that occur: about as many passes over the row as its length has bits. The result is LOWEST_KEY or
    the smallest kept key if all tokens together do not reach the target.
    """
    lanes = tl.arange(0, TILE)
    low = tl.full((), LOWEST_KEY, tl.int32)
    high = tl.full((), 0, tl.int32) if BY_DISTANCE else key_of(largest)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # The mean, rounded up; the sum might overflow.
        measure = tl.zeros((TILE,), tl.int64)
        above = tl.zeros((TILE,), tl.int32) + high
        below = tl.zeros((TILE,), tl.int32) + low
        for start in range(0, size, TILE):
            logits = load_logits(row, start + lanes, size)
            heights = heights_of(logits, largest, inverse)
            kept = is_kept(logits, heights, lowest_height, lowest_key, mean, LOWEST_KEY)
            keys = distance_key(heights, mean) if BY_DISTANCE else key_of(logits)
            reaches = kept & (keys >= middle)
            if BY_COUNT:
                measure += reaches.to(tl.int64)
            else:
                measure += tl.where(reaches, units_of(heights), 0)
            above = tl.where(reaches, tl.minimum(above, keys), above)
            below = tl.where(kept & (keys < middle), tl.maximum(below, keys), below)
        if tl.sum(measure, axis=0) >= target:
            low = tl.min(above, axis=0)
        else:
            high = tl.max(below, axis=0)
    return low


@triton.jit
def kept_units(
    row,
    size,
    largest,
    inverse,
    lowest_height,
    lowest_key,
    mean,
    farthest,
    TILE: tl.constexpr,
):
    lanes = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, size, TILE):
        logits = load_logits(row, start + lanes, size)
        heights = heights_of(logits, largest, inverse)
        kept = is_kept(logits, heights, lowest_height, lowest_key, mean, farthest)
        total += tl.where(kept, units_of(heights), 0)
    return tl.sum(total, axis=0)


@triton.jit
def kept_depth(row, size, largest, inverse, lowest_height, lowest_key, TILE: tl.constexpr):
    """Return the sum over the kept tokens of weight times depth (minus the height), in units: at most 2^44 / e each."""
    lanes = tl.arange(0, TILE)
    total = tl.zeros((TILE,), tl.int64)
    for start in range(0, size, TILE):
        logits = load_logits(row, start + lanes, size)
        heights = heights_of(logits, largest, inverse)
        kept = is_kept(logits, heights, lowest_height, lowest_key, 0.0, LOWEST_KEY)
        depths = tl.where(kept, -heights, 0.0)
        total += tl.where(kept, (tl.exp(-depths) * depths * UNIT).to(tl.int64), 0)
    return tl.sum(total, axis=0)


@triton.jit
def share_of(units, share):
    """Return at least 1, because a boundary for a target of 0 would be undefined."""
    return tl.maximum((units.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def philox_words(seed, position):
    """Return the four words of the reference's ``philox4x32`` with key ``seed`` and counter ``position``."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0)


@triton.jit
def uniform_of(first, second):
    """Return 53 bits of two words as a float64 in [0, 1): see ``reference.uniform``."""
    return ((first.to(tl.int64) << 21) ^ (second.to(tl.int64) >> 11)).to(tl.float64) * 2.0**-53


@triton.jit
def share_below(units, uniform):
    """Return the whole units below ``uniform`` of the total; fewer than all of them, whatever the rounding."""
    return tl.minimum((units.to(tl.float64) * uniform).to(tl.int64), units - 1)
