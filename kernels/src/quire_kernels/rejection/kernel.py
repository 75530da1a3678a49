"""Rejection sampling in Triton: the sampler over all rows, then a program per sequence that goes through its drafts.

Drafts without probabilities cost that one comparison. With them the sampler also tells what it drew from, and where a
draft is rejected the program goes through that row twice: for the sum of max(p - q, 0), and for the draw. Both are
computed in the sampler's whole units of weight, so that sums have no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.rejection import Verified
from quire_kernels.sampling.device_functions import (
    heights_of,
    is_kept,
    load_logits,
    philox_words,
    share_below,
    uniform_of,
    units_of,
)
from quire_kernels.sampling.kernel import sample, sample_and_tell
from quire_kernels.triton_runtime.aot_case import AotCase
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import target_of
from quire_kernels.triton_runtime.target import Target


@kernel
def _compare_kernel(drawn, drafts, starts, num_tokens):
    """num_tokens[b] = how many rows of sequence b there are up to the first that drew something else. Grid: B."""
    sequence = tl.program_id(0)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    row = begin
    going = row < end
    while going:
        going = row + 1 < end
        if going:
            going = tl.load(drawn + row) == tl.load(drafts + row)
        row += 1
    tl.store(num_tokens + sequence, row - begin)


@triton.jit
def _left_over(
    values,
    guesses,
    tokens,
    vocabulary,
    largest,
    inverse,
    lowest_height,
    lowest_key,
    mean,
    farthest,
    total,
):
    """max(p - q, 0) of each token, in units of which p has ``total``."""
    logits = load_logits(values, tokens, vocabulary)
    heights = heights_of(logits, largest, inverse)
    kept = is_kept(logits, heights, lowest_height, lowest_key, mean, farthest)
    guessed = tl.load(guesses + tokens, mask=tokens < vocabulary, other=0.0).to(tl.float64) * total
    return tl.maximum(tl.where(kept, units_of(heights), 0) - guessed.to(tl.int64), 0)


@kernel
def _judge_kernel(
    logits,
    row_stride,
    drafts,
    starts,
    draft_probs,
    probs_stride,
    temperatures,
    seeds,
    positions,
    drawn,
    kept_floats,
    kept_keys,
    kept_totals,
    token_ids,
    num_tokens,
    vocabulary,
    TILE: tl.constexpr,
):
    """Accepts draft d where u q(d) < p(d); draws the first other token from max(p - q, 0). Grid: B."""
    sequence = tl.program_id(0)
    begin, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    lanes = tl.arange(0, TILE)
    row = begin
    going = row < end
    while going:
        token = tl.load(drawn + row)
        going = row + 1 < end
        if going:
            draft = tl.load(drafts + row)
            tl.device_assert((draft >= 0) & (draft < vocabulary), "verify_drafts: drafts leave the vocabulary")
            total = tl.load(kept_totals + row).to(tl.float64)
            if (tl.load(temperatures + row) == 0.0) | (total == 0.0):
                going = token == draft
            else:
                values, guesses = logits + row * row_stride, draft_probs + row * probs_stride
                largest, inverse = tl.load(kept_floats + row * 4), tl.load(kept_floats + row * 4 + 1)
                lowest_height, mean = tl.load(kept_floats + row * 4 + 2), tl.load(kept_floats + row * 4 + 3)
                lowest_key, farthest = tl.load(kept_keys + row * 2), tl.load(kept_keys + row * 2 + 1)
                words = philox_words(tl.load(seeds + row), tl.load(positions + row))
                logit = load_logits(values, draft, vocabulary)
                height = heights_of(logit, largest, inverse)
                kept = is_kept(logit, height, lowest_height, lowest_key, mean, farthest)
                own = tl.where(kept, units_of(height), 0).to(tl.float64)
                judged = uniform_of(words[2], words[3]) * tl.load(guesses + draft).to(tl.float64) * total
                going = judged < own
                if going:
                    token = draft
                else:
                    left = tl.zeros((TILE,), tl.int64)
                    for start in range(0, vocabulary, TILE):
                        left += _left_over(
                            values,
                            guesses,
                            start + lanes,
                            vocabulary,
                            largest,
                            inverse,
                            lowest_height,
                            lowest_key,
                            mean,
                            farthest,
                            total,
                        )
                    whole = tl.sum(left, axis=0)
                    goal = share_below(whole, uniform_of(words[0], words[1]))
                    passed = tl.full((), 0, tl.int64)
                    start = tl.full((), 0, tl.int32)
                    # Nothing is left where the two are one and the same but for rounding: what was drawn stands then.
                    searching = whole > 0
                    while searching & (start < vocabulary):
                        here = _left_over(
                            values,
                            guesses,
                            start + lanes,
                            vocabulary,
                            largest,
                            inverse,
                            lowest_height,
                            lowest_key,
                            mean,
                            farthest,
                            total,
                        )
                        inside = tl.sum(here, axis=0)
                        if passed + inside > goal:
                            reached = passed + tl.cumsum(here, axis=0) > goal
                            token = tl.min(tl.where(reached, start + lanes, 0x7FFFFFFF), axis=0).to(tl.int64)
                            searching = passed < 0
                        passed += inside
                        start += TILE
        tl.store(token_ids + row, token)
        row += 1
    tl.store(num_tokens + sequence, row - begin)


def verify_drafts(
    logits: Tensor,
    drafts: Tensor,
    starts: Tensor,
    draft_probs: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    typical_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Verified:
    sequences, device = starts.shape[0] - 1, logits.device
    num_tokens = torch.empty(sequences, dtype=torch.int64, device=device)
    columns = (temperature, top_k, top_p, min_p, typical_p, seeds, positions)
    if logits.shape[0] == 0:
        return Verified(token_ids=torch.empty_like(drafts), num_tokens=num_tokens.zero_())
    target = target_of(device)
    if draft_probs is None:
        drawn = sample(logits, *columns)
        if sequences:
            options = config_for("rejection.compare", target).options
            _compare_kernel[(sequences,)](drawn, drafts, starts, num_tokens, **options)
        return Verified(token_ids=drawn, num_tokens=num_tokens)
    drawn, kept = sample_and_tell(logits, *columns)
    token_ids = torch.empty_like(drawn)
    if sequences:
        _judge_kernel[(sequences,)](
            logits,
            logits.stride(0),
            drafts,
            starts,
            draft_probs,
            draft_probs.stride(0),
            temperature,
            seeds,
            positions,
            drawn,
            kept.floats,
            kept.keys,
            kept.totals,
            token_ids,
            num_tokens,
            logits.shape[1],
            **config_for("rejection.judge", target).options,
        )
    return Verified(token_ids=token_ids, num_tokens=num_tokens)


def aot_cases(target: Target) -> list[AotCase]:
    columns = {
        **dict.fromkeys(("logits", "draft_probs", "temperatures", "kept_floats"), "*fp32:16"),
        **dict.fromkeys(("drafts", "starts", "seeds", "positions", "drawn", "token_ids", "num_tokens"), "*i64:16"),
        "kept_keys": "*i32:16",
        "kept_totals": "*i64:16",
        **dict.fromkeys(("row_stride", "probs_stride"), "i64:16"),
        "vocabulary": "i32:16",
    }
    cases = []
    for name, function in (("compare", _compare_kernel), ("judge", _judge_kernel)):
        config = config_for(f"rejection.{name}", target)
        cases.append(
            AotCase(
                name=name,
                kernel=function,
                signature={key: kind for key, kind in columns.items() if key in function.arg_names},
                constexprs=dict(config.blocks),
                num_warps=config.num_warps,
                num_stages=config.num_stages,
                decode_path=True,
            )
        )
    return cases
