"""What the device kernels know of a row of logits: its weights, which are kept, and where the last kept stands.

Device functions, used by the kernels of ``sampling`` and ``logprobs``. Two choices make what they find
independent of how a row is split over programs and tiles:

Weights are added as whole numbers of 2^-44: exp(height) is at most 1 and a row has at most 2^18 of them, so int64 holds
every sum, and a sum of integers has no order. A weight below 2^-44 of the largest counts as none.

Boundaries are searched for among the logits, not among the weights made of them: floats order as their bits do, so a
boundary is found exactly by halving an interval of integers, and equal logits fall on the same side.

Legend: height of a token = (logit - largest logit) / temperature; key = int32 that orders as the logit does.
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
    """float32; minus infinity beyond ``end`` and for what is no number; one zero instead of two."""
    logits = tl.load(row + tokens, mask=tokens < end, other=_MINUS_INFINITY).to(tl.float32)
    logits = tl.where(logits == logits, logits, _MINUS_INFINITY)
    return tl.where(logits == 0.0, 0.0, logits)


@triton.jit
def inverse_of(temperature):
    """Kept finite, lest the largest logit's distance of 0 from itself become NaN where the temperature is subnormal."""
    return tl.minimum(1.0 / temperature, _LARGEST_FLOAT32)


@triton.jit
def heights_of(logits, largest, inverse):
    """0 for the largest also where that is infinite; in a row of minus infinities all are minus infinity."""
    below = (logits - largest) * inverse
    return tl.where(logits == _MINUS_INFINITY, _MINUS_INFINITY, tl.where(logits == largest, 0.0, below))


@triton.jit
def units_of(heights):
    """exp(height) in whole units."""
    return (tl.exp(heights) * UNIT).to(tl.int64)


@triton.jit
def pivot_at(number):
    """The heights at which a survey counts, falling from -1 to -15.875; exact, so the same wherever it is computed."""
    number = number.to(tl.float32)
    return -(1.0 + 1.25 * number + 0.125 * number * number)


@triton.jit
def key_of(logits):
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def distance_key(heights, mean):
    """Orders as the nearness of the height to ``mean`` does: the nearest has the largest."""
    return -(tl.abs(heights - mean).to(tl.int32, bitcast=True))


@triton.jit
def is_kept(logits, heights, lowest_height, lowest_key, mean, farthest):
    """May the token be drawn? ``farthest`` is a distance key; LOWEST_KEY keeps all, as minus infinity for heights."""
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
    """The largest key such that the kept tokens at or above it reach ``target``, in number or in units of weight.

    Keys are of logits, or of distances from ``mean``. Halves the interval in which the key lies, and each time draws
    its ends in to keys that occur: as many passes over the row as its length has bits, or a few more.
    LOWEST_KEY or the smallest kept key where all together do not reach it.
    """
    lanes = tl.arange(0, TILE)
    low = tl.full((), LOWEST_KEY, tl.int32)
    high = tl.full((), 0, tl.int32) if BY_DISTANCE else key_of(largest)
    while low < high:
        middle = (low | high) - ((low ^ high) >> 1)  # their mean, rounded up; their sum might overflow
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
    """The weight of what is kept."""
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
    """Sum over what is kept of weight times depth, which is less its height, in units: at most 2^44 / e each."""
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
    """At least 1: a boundary that need reach nothing is none."""
    return tl.maximum((units.to(tl.float64) * share.to(tl.float64)).to(tl.int64), 1)


@triton.jit
def philox_words(seed, position):
    """The four words of the reference's ``philox4x32`` with key ``seed`` and counter ``position``."""
    low = (position & 0xFFFFFFFF).to(tl.uint32)
    high = ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.philox(seed, low, high, low * 0, low * 0)


@triton.jit
def uniform_of(first, second):
    """53 bits of two words as a float64 in [0, 1): see ``reference.uniform``."""
    return ((first.to(tl.int64) << 21) ^ (second.to(tl.int64) >> 11)).to(tl.float64) * 2.0**-53


@triton.jit
def share_below(units, uniform):
    """The whole units below ``uniform`` of them all; fewer than all, whatever the rounding."""
    return tl.minimum((units.to(tl.float64) * uniform).to(tl.int64), units - 1)
