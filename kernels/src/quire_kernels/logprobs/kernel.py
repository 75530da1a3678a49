"""Log-probabilities in Triton, without a sort: the sampler's survey of each row in parts, then one program per row.

The most probable tokens are selected in token order from the row's candidates (see ``sampling.device_kernels``), and
then ordered by counting, for each, how many precede it. The count compares every pair: this suits the usual 20 tokens,
and takes about a second for a whole vocabulary.

Legend: K rows, V vocabulary, M most probable tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.logprobs import Logprobs
from quire_kernels.sampling.device_functions import LOWEST_KEY, NUM_PIVOTS, boundary, key_of, load_logits
from quire_kernels.sampling.device_kernels import MOST_CANDIDATES, MOST_PARTS, list_candidates, survey
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import target_of
from quire_kernels.triton_runtime.launch import Launch, launches
from quire_kernels.triton_runtime.target import Target

_KEY_OF_MINUS_INFINITY: tl.constexpr = tl.constexpr(-0x7F800001)
_MOST_ROWS = 1024
"""Rows per launch: a long prompt has many rows, and each needs 64 KiB for its candidates."""
_ORDER_TILE: tl.constexpr = tl.constexpr(32)


@triton.jit
def _pick_likeliest(
    source, size, source_tokens, largest, most, picked, picked_tokens, HAS_TOKENS: tl.constexpr, TILE: tl.constexpr
):
    """Write the ``most`` most probable tokens of ``source`` in token order; the lower id wins among equals."""
    lanes = tl.arange(0, TILE)
    no_height = float("-inf")
    lowest = boundary(source, size, largest, 1.0, no_height, LOWEST_KEY, 0.0, most, True, False, TILE)
    # Forbidden tokens and NaN come last, and are all equal.
    lowest = tl.maximum(lowest, _KEY_OF_MINUS_INFINITY)
    above = tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        above += (key_of(load_logits(source, start + lanes, size)) > lowest).to(tl.int32)
    room = most - tl.sum(above, axis=0)  # The room for logits that equal the boundary.
    written = room * 0
    for start in range(0, size, TILE):
        places = start + lanes
        logits = load_logits(source, places, size)
        equal = (key_of(logits) == lowest) & (places < size)
        order = tl.cumsum(equal.to(tl.int32), axis=0)
        taken = (key_of(logits) > lowest) | (equal & (order <= room))
        room -= tl.sum(equal.to(tl.int32), axis=0)
        targets = written + tl.cumsum(taken.to(tl.int32), axis=0) - 1
        tokens = places
        if HAS_TOKENS:
            tokens = tl.load(source_tokens + places, mask=taken, other=0)
        tl.store(picked + targets, logits, mask=taken)
        tl.store(picked_tokens + targets, tokens, mask=taken)
        written += tl.sum(taken.to(tl.int32), axis=0)


@kernel(varying=["most", "parts"])
def _report_kernel(
    logits,
    row_stride,
    lines,
    token_ids,
    vocabulary,
    part_length,
    parts,
    most,
    part_largest,
    part_units,
    counts,
    list_logits,
    list_tokens,
    picked,  # [K, M]
    picked_tokens,  # [K, M]
    of_token,
    rank,
    likeliest,  # [K, M]
    logprobs,  # [K, M]
    MOST_PARTS: tl.constexpr,
    MOST_CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute of_token = logit - largest - log sum exp(logit - largest), and the same for the ``most`` probable.

    Grid: K.
    """
    item = tl.program_id(0).to(tl.int64)
    row = logits + tl.load(lines + item) * row_stride
    token = tl.load(token_ids + item)
    tl.device_assert((token >= 0) & (token < vocabulary), "token_logprobs: token_ids leave the vocabulary")
    is_part = tl.arange(0, MOST_PARTS) < parts
    places = item * parts + tl.arange(0, MOST_PARTS)
    largest = tl.max(tl.load(part_largest + places, mask=is_part, other=float("-inf")), axis=0)
    units = tl.sum(tl.load(part_units + places, mask=is_part, other=0), axis=0)
    log_of_sum = tl.log(units.to(tl.float32) * 2.0**-44)
    value = load_logits(row, token, vocabulary)
    # The sum of largest and log_of_sum would be rounded to the former.
    tl.store(of_token + item, (value - largest) - log_of_sum)
    # The work per logit is small here, so each load covers more logits.
    wide = tl.arange(0, 4 * TILE)
    likelier = tl.zeros((4 * TILE,), tl.int32)
    for start in range(0, vocabulary, 4 * TILE):
        likelier += (load_logits(row, start + wide, vocabulary) > value).to(tl.int32)
    tl.store(rank + item, tl.sum(likelier, axis=0).to(tl.int64) + 1)
    if most == 0:
        return

    each = places[:, None] * NUM_PIVOTS + tl.arange(0, NUM_PIVOTS)[None, :]
    count = tl.sum(tl.load(counts + each, mask=is_part[:, None], other=0), axis=0)
    chosen = tl.min(tl.where(count >= most, tl.arange(0, NUM_PIVOTS), NUM_PIVOTS), axis=0)
    size = tl.sum(tl.where(tl.arange(0, NUM_PIVOTS) == chosen, count, 0), axis=0)
    own_picked, own_tokens = picked + item * most, picked_tokens + item * most
    if (chosen < NUM_PIVOTS) & (size <= MOST_CANDIDATES):
        own_list = list_logits + item * MOST_CANDIDATES
        own_names = list_tokens + item * MOST_CANDIDATES
        own_counts = counts + item * parts * NUM_PIVOTS
        list_candidates(
            row, vocabulary, part_length, parts, largest, 1.0, own_counts, chosen, own_list, own_names, TILE
        )
        tl.debug_barrier()
        _pick_likeliest(own_list, size, own_names, largest, most, own_picked, own_tokens, True, TILE)
    else:
        _pick_likeliest(row, vocabulary, list_tokens, largest, most, own_picked, own_tokens, False, TILE)
    tl.debug_barrier()
    each_of = tl.arange(0, _ORDER_TILE)
    for start in range(0, most, _ORDER_TILE):
        mine = start + each_of
        values = tl.load(own_picked + mine, mask=mine < most, other=0.0)
        names = tl.load(own_tokens + mine, mask=mine < most, other=0)
        before = tl.zeros((_ORDER_TILE,), tl.int32)
        for begin in range(0, most, _ORDER_TILE):
            others = begin + each_of
            beside = tl.load(own_picked + others, mask=others < most, other=float("-inf"))[None, :]
            earlier = (beside == values[:, None]) & (others[None, :] < mine[:, None])
            before += tl.sum(((beside > values[:, None]) | earlier).to(tl.int32), axis=1)
        tl.store(likeliest + item * most + before, names.to(tl.int64), mask=mine < most)
        tl.store(logprobs + item * most + before, (values - largest) - log_of_sum, mask=mine < most)


def token_logprobs(logits: Tensor, lines: Tensor, token_ids: Tensor, most: int) -> Logprobs:
    rows, device = lines.shape[0], logits.device
    made = Logprobs(
        of_token=torch.empty(rows, dtype=torch.float32, device=device),
        rank=torch.empty(rows, dtype=torch.int64, device=device),
        token_ids=torch.empty((rows, most), dtype=torch.int64, device=device),
        logprobs=torch.empty((rows, most), dtype=torch.float32, device=device),
    )
    for begin in range(0, rows, _MOST_ROWS):
        end = min(begin + _MOST_ROWS, rows)
        part = Logprobs(
            of_token=made.of_token[begin:end],
            rank=made.rank[begin:end],
            token_ids=made.token_ids[begin:end],
            logprobs=made.logprobs[begin:end],
        )
        _report(logits, lines[begin:end], token_ids[begin:end], most, part)
    return made


def _report(logits: Tensor, lines: Tensor, token_ids: Tensor, most: int, made: Logprobs) -> None:
    rows, device = lines.shape[0], logits.device
    found = survey("token_logprobs", logits, rows, lines=lines)
    _launch(target_of(device))(
        (rows,),
        logits,
        logits.stride(0),
        lines,
        token_ids,
        logits.shape[1],
        found.part_length,
        found.parts,
        most,
        found.largest,
        found.units,
        found.counts,
        found.list_logits,
        found.list_tokens,
        torch.empty((rows, most), dtype=torch.float32, device=device),
        torch.empty((rows, most), dtype=torch.int32, device=device),
        made.of_token,
        made.rank,
        made.token_ids,
        made.logprobs,
    )


@launches
def _launch(target: Target) -> Launch:
    options = config_for("logprobs.report", target).options
    return Launch(_report_kernel, MOST_PARTS=MOST_PARTS, MOST_CANDIDATES=MOST_CANDIDATES, **options)
