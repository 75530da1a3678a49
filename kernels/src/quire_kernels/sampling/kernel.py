"""Sampling in Triton, without a sort: a survey of each row by many programs, then one program per row that samples.

The last launch searches the boundaries of min_p, top_k, top_p and typical_p among the row's candidates: the survey
provides a height that is certainly below the first boundary, and rarely more than some hundred tokens are above it. If
there are more than a list can hold (flat distributions with a high top_p), it searches the whole row instead.

Memory traffic: two reads of the logits from memory and one from the cache. A row that keeps all its tokens is read
twice, and a part of it once more.
"""

import torch
import triton.language as tl
from torch import Tensor

from quire_kernels.sampling.device_functions import (
    LOWEST_KEY,
    NUM_PIVOTS,
    boundary,
    heights_of,
    inverse_of,
    is_kept,
    kept_depth,
    kept_units,
    load_logits,
    philox_words,
    pivot_at,
    share_below,
    share_of,
    uniform_of,
    units_of,
)
from quire_kernels.sampling.device_kernels import (
    MOST_CANDIDATES,
    MOST_PARTS,
    Survey,
    find_largest,
    list_candidates,
    number_of_parts,
    survey,
)
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import device_properties, require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.target import Target


@kernel(varying=["parts"])
def _first_kernel(largest, tokens, drawn, parts, MOST_PARTS: tl.constexpr) -> None:
    """Compute drawn[b] = tokens[b, argmax of largest[b]]; the first wins among equals. Grid: B."""
    item = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, MOST_PARTS)
    tops = tl.load(largest + item * parts + part, mask=part < parts, other=float("-inf"))
    names = tl.load(tokens + item * parts + part, mask=part < parts, other=1 << 62)
    tl.store(drawn + item, tl.min(tl.where(tops == tl.max(tops, axis=0), names, 1 << 62), axis=0))


@kernel(varying=["parts"])
def _draw_kernel(
    logits,
    row_stride,
    vocabulary,
    part_length,
    parts,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    typical_ps,
    seeds,
    positions,
    part_largest,
    part_tokens,
    part_units,
    counts,
    masses,
    list_logits,
    list_tokens,
    drawn,
    MOST_PARTS: tl.constexpr,
    MOST_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Compute drawn[b] = the first token at which the sum of kept weights exceeds Philox(seed, position) of the total.

    Weights are exp((logit - largest) / temperature) in whole units of 2^-44 (``device_functions``). Kept are, in order:
    weights of at least min_p; the top_k largest; the largest that sum to top_p of these; the nearest to the entropy
    that sum to typical_p of these; each with its equals. Philox: Salmon et al., SC 2011. Grid: B.
    """
    item = tl.program_id(0).to(tl.int64)
    row = logits + item * row_stride
    places = tl.arange(0, MOST_PARTS)
    is_part = places < parts
    tops = tl.load(part_largest + item * parts + places, mask=is_part, other=float("-inf"))
    largest = tl.max(tops, axis=0)
    heat = tl.load(temperatures + item)
    firsts = tl.load(part_tokens + item * parts + places, mask=is_part, other=1 << 62)
    first = tl.min(tl.where(tops == largest, firsts, 1 << 62), axis=0)
    tl.store(drawn + item, first)
    # In a row of minus infinities, no token can be sampled by weight.
    if (heat == 0.0) | (largest == float("-inf")):
        return

    inverse = inverse_of(heat)
    top_k = tl.load(top_ks + item)
    top_p = tl.load(top_ps + item)
    typical_p = tl.load(typical_ps + item)
    min_p = tl.load(min_ps + item)
    lowest_height = tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    cuts_count = top_k < vocabulary
    cuts_height = lowest_height > float("-inf")
    cuts_mass = top_p < 1.0

    # The candidates are all tokens at or above the highest pivot that is certainly not above the first boundary.
    each = (item * parts + places[:, None]) * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)[None, :]
    count = tl.sum(tl.load(counts + each, mask=is_part[:, None], other=0), axis=0)
    mass = tl.sum(tl.load(masses + each, mask=is_part[:, None], other=0.0), axis=0)
    units = tl.load(part_units + item * parts + places, mask=is_part, other=0)
    total = tl.sum(units, axis=0)
    pivots = pivot_at(tl.arange(0, NUM_PIVOTS))
    # The survey's sums are off by less than 1e-4. With top_k or min_p, the total that top_p refers to is not yet known.
    enough_mass = (top_p + 1e-4) * (total.to(tl.float32) * 2.0**-44)
    enough_mass = tl.where(cuts_count | cuts_height, float("inf"), enough_mass)
    surely = (count >= top_k) | (pivots <= lowest_height) | (mass >= enough_mass)
    chosen = tl.min(tl.where(surely, tl.arange(0, NUM_PIVOTS), NUM_PIVOTS), axis=0)
    size = tl.sum(tl.where(tl.arange(0, NUM_PIVOTS) == chosen, count, 0), axis=0)
    listed = (chosen < NUM_PIVOTS) & (size <= MOST_CANDIDATES)
    source = row
    own_logits = list_logits + item * MOST_CANDIDATES
    own_tokens = list_tokens + item * MOST_CANDIDATES
    if listed:
        own_counts = counts + item * parts * NUM_PIVOTS
        list_candidates(
            row, vocabulary, part_length, parts, largest, inverse, own_counts, chosen, own_logits, own_tokens, TILE
        )
        tl.debug_barrier()
        source = own_logits
    else:
        size += vocabulary - size

    lowest_key = tl.full((), LOWEST_KEY, tl.int32)
    farthest = tl.full((), LOWEST_KEY, tl.int32)
    mean = tl.full((), 0.0, tl.float32)
    if cuts_count:
        lowest_key = boundary(source, size, largest, inverse, float("-inf"), lowest_key, mean, top_k, True, False, TILE)
    if cuts_count | cuts_height:
        total = kept_units(source, size, largest, inverse, lowest_height, lowest_key, mean, farthest, TILE)
    if cuts_mass:
        target = share_of(total, top_p)
        lowest_key = boundary(
            source, size, largest, inverse, lowest_height, lowest_key, mean, target, False, False, TILE
        )
        total = kept_units(source, size, largest, inverse, lowest_height, lowest_key, mean, farthest, TILE)
    if typical_p < 1.0:
        depth = kept_depth(source, size, largest, inverse, lowest_height, lowest_key, TILE)
        mean = -(depth.to(tl.float64) / total.to(tl.float64)).to(tl.float32)
        target = share_of(total, typical_p)
        farthest = boundary(source, size, largest, inverse, lowest_height, lowest_key, mean, target, False, True, TILE)
        total = kept_units(source, size, largest, inverse, lowest_height, lowest_key, mean, farthest, TILE)

    words = philox_words(tl.load(seeds + item), tl.load(positions + item))
    goal = share_below(total, uniform_of(words[0], words[1]))
    start = tl.full((), 0, tl.int32)
    passed = tl.full((), 0, tl.int64)
    if (cuts_count | cuts_height | cuts_mass | (typical_p < 1.0)) == 0:
        # All tokens are kept: the survey's sums give the part that contains the sampled token.
        sums = tl.cumsum(units, axis=0)
        part = tl.sum((sums <= goal).to(tl.int32), axis=0)
        passed = tl.sum(tl.where(places < part, units, 0), axis=0)
        start = part * part_length
    lanes = tl.arange(0, TILE)
    token = tl.full((), -1, tl.int32)
    while (start < size) & (token < 0):
        values = load_logits(source, start + lanes, size)
        heights = heights_of(values, largest, inverse)
        kept = is_kept(values, heights, lowest_height, lowest_key, mean, farthest)
        here = tl.where(kept, units_of(heights), 0)
        inside = tl.sum(here, axis=0)
        if passed + inside > goal:
            reached = passed + tl.cumsum(here, axis=0) > goal
            token = tl.min(tl.where(reached, start + lanes, 0x7FFFFFFF), axis=0)
        passed += inside
        start += TILE
    if listed:
        token = tl.load(own_tokens + token)
    tl.store(drawn + item, token.to(tl.int64))


def greedy(logits: Tensor) -> Tensor:
    rows, vocabulary = logits.shape
    device = logits.device
    require_device("greedy", device)
    drawn = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return drawn
    parts = number_of_parts(rows, vocabulary, device_properties(device).multiprocessors)
    largest = torch.empty((rows, parts), dtype=torch.float32, device=device)
    tokens = drawn.view(rows, 1) if parts == 1 else torch.empty((rows, parts), dtype=torch.int64, device=device)
    find_largest(logits, largest, tokens, None)
    if parts > 1:
        _first(target_of(device))((rows,), largest, tokens, drawn, parts)
    return drawn


@launches
def _first(target: Target) -> Launch:
    return Launch(_first_kernel, MOST_PARTS=MOST_PARTS, **config_for("sampling.first", target).options)


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
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return drawn
    found: Survey = survey("sample", logits, rows, temperature=temperature)
    _draw_launch(target_of(logits.device))(
        (rows,),
        logits,
        logits.stride(0),
        vocabulary,
        found.part_length,
        found.parts,
        temperature,
        top_k,
        top_p,
        min_p,
        typical_p,
        seeds,
        positions,
        found.largest,
        found.tokens,
        found.units,
        found.counts,
        found.masses,
        found.list_logits,
        found.list_tokens,
        drawn,
    )
    return drawn


@launches
def _draw_launch(target: Target) -> Launch:
    return Launch(
        _draw_kernel,
        MOST_PARTS=MOST_PARTS,
        MOST_CANDIDATES=MOST_CANDIDATES,
        **config_for("sampling.draw", target).options,
    )
