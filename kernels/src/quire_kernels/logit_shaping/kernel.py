"""Logit shaping in Triton, which visits the ids that a row names, not the vocabulary.

One program per row performs the steps in order, because several may change the same logit. Only the tokens that a row's
list of allowed ids forbids cover the vocabulary; a launch of many programs writes them before. No two programs change
the same logit, so nothing needs atomics.

Legend: S rows to shape, V vocabulary.
"""

import triton.language as tl
from torch import Tensor

from quire_kernels.logit_shaping import NUM_BOUNDS, TAIL, LogitEdits
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches
from quire_kernels.triton_runtime.target import Target

_BOUNDS: tl.constexpr = tl.constexpr(NUM_BOUNDS)
_TAIL: tl.constexpr = tl.constexpr(TAIL)
_FORBIDDEN: tl.constexpr = tl.constexpr(float("-inf"))
_SHARE = 8192
"""The number of logits that one program checks against the allowed ids."""
assert TAIL & (TAIL - 1) == 0, "the tail is a ring indexed by masking"


@kernel(varying=["num_lines", "num_rows"])
def _allow_kernel(
    logits,
    row_stride,
    lines,
    rows,
    ids,
    bounds,
    vocabulary,
    num_lines,
    num_rows,
    SHARE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Forbid all tokens outside a row's allowed ids, if it has any, by searching each token in the sorted list.

    Grid: S, shares of the vocabulary.
    """
    item = tl.program_id(0).to(tl.int64)
    row, line = tl.load(rows + item), tl.load(lines + item)
    tl.device_assert((row >= 0) & (row < num_rows), "shape_logits: rows leave the edits")
    tl.device_assert((line >= 0) & (line < num_lines), "shape_logits: lines leave the logits")
    begin = tl.load(bounds + row * _BOUNDS)
    count = (tl.load(bounds + row * _BOUNDS + 1) - begin).to(tl.int32)
    if count == 0:
        return
    first = tl.program_id(1) * SHARE
    lanes = tl.arange(0, TILE)
    for start in range(first, tl.minimum(first + SHARE, vocabulary), TILE):
        tokens = start + lanes
        low = tl.zeros((TILE,), tl.int32)
        high = low + count
        span = count
        while span > 0:
            middle = (low + high) >> 1
            unsettled = low < high
            earlier = unsettled & (tl.load(ids + begin + middle, mask=unsettled, other=0) < tokens)
            low = tl.where(earlier, middle + 1, low)
            high = tl.where(unsettled & ~earlier, middle, high)
            span >>= 1
        there = low < count
        allowed = there & (tl.load(ids + begin + low, mask=there, other=-1) == tokens)
        tl.store(logits + line * row_stride + tokens, _FORBIDDEN, mask=(tokens < vocabulary) & ~allowed)


@kernel
def _shape_kernel(
    logits,
    row_stride,
    lines,
    rows,
    ids,
    values,
    bounds,
    penalties,
    min_tokens,
    num_drawn,
    tails,
    vocabulary,
    TILE: tl.constexpr,
):
    """Apply forbidden words, minimum length, biases, penalties (Keskar et al., CTRL, 2019), in this order. Grid: S.

    Threads of a program write the same logits in different steps, so there is a barrier between the steps.
    """
    item = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + item)
    target = logits + tl.load(lines + item) * row_stride
    own = bounds + row * _BOUNDS
    drawn = tl.load(num_drawn + row)
    lanes = tl.arange(0, TILE)

    place, end = tl.load(own + 1), tl.load(own + 2)
    back = tl.arange(0, _TAIL) + 1
    while place < end:
        count = tl.load(ids + place)
        last = place + count
        compared = (back < count) & (back <= drawn)
        seen = tl.load(tails + row * _TAIL + ((drawn - back) & (_TAIL - 1)), mask=compared, other=0)
        wanted = tl.load(ids + last - back, mask=compared, other=0)
        differing = tl.sum((compared & (seen != wanted)).to(tl.int32), axis=0)
        if (drawn >= count - 1) & (differing == 0):
            token = tl.load(ids + last)
            tl.device_assert(
                (token >= 0) & (token < vocabulary), "shape_logits: words of the edits leave the vocabulary"
            )
            tl.store(target + token, _FORBIDDEN)
        place = last + 1

    if drawn < tl.load(min_tokens + row):
        end = tl.load(own + 3)
        for start in range(tl.load(own + 2), end, TILE):
            inside = start + lanes < end
            tokens = tl.load(ids + start + lanes, mask=inside, other=0)
            tl.device_assert(
                (tokens >= 0) & (tokens < vocabulary), "shape_logits: stops of the edits leave the vocabulary"
            )
            tl.store(target + tokens, _FORBIDDEN, mask=inside)
    tl.debug_barrier()

    end = tl.load(own + 4)
    for start in range(tl.load(own + 3), end, TILE):
        inside = start + lanes < end
        tokens = tl.load(ids + start + lanes, mask=inside, other=0)
        tl.device_assert(
            (tokens >= 0) & (tokens < vocabulary), "shape_logits: biases of the edits leave the vocabulary"
        )
        added = tl.load(values + start + lanes, mask=inside, other=0.0)
        tl.store(target + tokens, tl.load(target + tokens, mask=inside, other=0.0) + added, mask=inside)
    tl.debug_barrier()

    repetition = tl.load(penalties + row * 3)
    frequency, presence = tl.load(penalties + row * 3 + 1), tl.load(penalties + row * 3 + 2)
    end = tl.load(own + 5)
    for start in range(tl.load(own + 4), end, TILE):
        inside = start + lanes < end
        tokens = tl.load(ids + start + lanes, mask=inside, other=0)
        tl.device_assert((tokens >= 0) & (tokens < vocabulary), "shape_logits: counted ids leave the vocabulary")
        counts = tl.load(values + start + lanes, mask=inside, other=0.0)
        value = tl.load(target + tokens, mask=inside, other=0.0)
        value = tl.where(value > 0.0, tl.div_rn(value, tl.zeros((TILE,), tl.float32) + repetition), value * repetition)
        value -= frequency * counts
        value -= tl.where(counts > 0.0, presence, 0.0)
        tl.store(target + tokens, value, mask=inside)


@kernel(varying=["num_rows"])
def _count_kernel(token_ids, rows, ids, values, bounds, num_drawn, tails, num_rows, TILE: tl.constexpr):
    """Count one more of its token for each row: increment the id in the row's list, or append it. Grid: S."""
    item = tl.program_id(0).to(tl.int64)
    row, token = tl.load(rows + item), tl.load(token_ids + item).to(tl.int32)
    tl.device_assert((row >= 0) & (row < num_rows), "count_tokens: rows leave the edits")
    own = bounds + row * _BOUNDS
    begin, end, room = tl.load(own + 4), tl.load(own + 5), tl.load(own + 6)
    drawn = tl.load(num_drawn + row)
    # One thread updates the end and the number, after all have read them; otherwise warps would loop differently.
    tl.debug_barrier()
    if room > begin:
        lanes = tl.arange(0, TILE)
        start, place = begin, end
        while (start < end) & (place == end):
            places = start + lanes
            known = tl.load(ids + places, mask=places < end, other=-1)
            place = tl.min(tl.where((known == token) & (places < end), places, end), axis=0)
            start += TILE
        if place < end:
            tl.store(values + place, tl.load(values + place) + 1.0)
        else:
            tl.device_assert(end < room, "count_tokens: edits have a row without room for another id")
            if end < room:
                tl.store(ids + end, token)
                tl.store(values + end, 1.0)
                tl.store(own + 5, end + 1)
    tl.store(tails + row * _TAIL + (drawn & (_TAIL - 1)), token)
    tl.store(num_drawn + row, drawn + 1)


def shape_logits(logits: Tensor, lines: Tensor, rows: Tensor, edits: LogitEdits) -> None:
    require_device("shape_logits", logits.device)
    count, vocabulary = rows.shape[0], logits.shape[1]
    if count == 0:
        return
    target = target_of(logits.device)
    shares = cdiv(vocabulary, _SHARE)
    allow, shape, _ = _launches(target)
    allow(
        (count, shares),
        logits,
        logits.stride(0),
        lines,
        rows,
        edits.ids,
        edits.bounds,
        vocabulary,
        logits.shape[0],
        edits.bounds.shape[0],
    )
    shape(
        (count,),
        logits,
        logits.stride(0),
        lines,
        rows,
        edits.ids,
        edits.values,
        edits.bounds,
        edits.penalties,
        edits.min_tokens,
        edits.num_drawn,
        edits.tails,
        vocabulary,
    )


def count_tokens(token_ids: Tensor, rows: Tensor, edits: LogitEdits) -> bool:
    """Return True without a check, because the host would have to wait for it.

    The owner of the pool knows each row's room. A row without room counts nothing; the debug build stops there.
    """
    require_device("count_tokens", token_ids.device)
    if rows.shape[0]:
        *_, count = _launches(target_of(token_ids.device))
        count(
            (rows.shape[0],),
            token_ids,
            rows,
            edits.ids,
            edits.values,
            edits.bounds,
            edits.num_drawn,
            edits.tails,
            edits.bounds.shape[0],
        )
    return True


@launches
def _launches(target: Target) -> tuple[Launch, Launch, Launch]:
    """Return the launches that allow tokens, shape logits and count tokens."""
    return (
        Launch(_allow_kernel, SHARE=_SHARE, **config_for("logit_shaping.allow", target).options),
        Launch(_shape_kernel, **config_for("logit_shaping.shape", target).options),
        Launch(_count_kernel, **config_for("logit_shaping.count", target).options),
    )
