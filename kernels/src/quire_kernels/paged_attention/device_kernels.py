"""The Triton kernels of ``paged_attention`` that each layer launches.

``_attend_kernel`` computes the items of one list of a schedule (``device_plan``): a query tile and a range of its
context. A tile whose context is split leaves partial results, which ``_join_kernel`` merges by token.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence, R results of
one head: first those of P partial results, then those that programs keep for themselves.
"""

import triton
import triton.language as tl

from quire_kernels.paged_attention.device_functions import (
    attend,
    clear_padding,
    first_seen,
    fresh_softmax,
    join,
    load_rows,
    normaliser,
    rows_for,
    score_units,
)
from quire_kernels.paged_attention.device_plan import COUNTS, ITEM_WIDTH, JOIN_WIDTH, LISTS, ZERO
from quire_kernels.triton_runtime.debug import CHECKED

# These numbers change from step to step. If Triton specialized on 1 or multiples of 16, it would compile during
# serving.
_VARYING = [
    "num_sequences",
    "num_rows",
    "num_blocks",
    "table_stride",
    "window",
    "capacity",
    "num_partials",
    "num_results",
]


@triton.jit
def _compute_item(
    item,
    kv_head,
    visited,
    own,
    results,
    queries,
    whole_cache,
    scoring,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    VISITS: tl.constexpr,
    PLAIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute an item, or its next split, and return the tokens of its context that are done, or 0 if it is complete.

    visited  the tokens that are done
    own      the first of the BLOCK_M results in memory that the program keeps for itself
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    out, partials, statistics, zero = results
    keys, values, key_scale, value_scale, num_blocks, block_tables, table_stride = whole_cache
    sinks, scale, soft_cap, window = scoring
    dims = tl.arange(0, BLOCK_D)
    next_visited = tl.full((), 0, tl.int32)
    sequence, first_row, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    first_position, begin, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    size = tl.load(item + 6)
    # The compiler learns that a tile begins at a multiple of TILE from 0 on, which saves 100 instructions in each.
    WHOLE_TILES: tl.constexpr = 0x7FFFFFFF - (TILE - 1)
    begin &= WHOLE_TILES
    rows, row_tokens, heads, is_row = load_rows(
        queries[0], queries[1], first_row, count, kv_head, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, INTERPRETED
    )
    rows = rows_for(rows, keys.dtype.element_ty)
    positions = first_position + row_tokens
    unit, cap = score_units(scale, soft_cap, key_scale, kv_head)
    high = tl.minimum(first_position + count, end) & 0x7FFFFFFF
    low = first_seen(first_position, window)
    head_place = kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    cache = (keys + head_place, values + head_place, table, num_blocks)
    rule = (low, high, positions, window)
    units = (unit, cap, soft_cap)
    softmax = fresh_softmax(BLOCK_M, BLOCK_D)
    if PLAIN:
        # Every row sees all of the tiles from the one after the last row's first visible token to the first
        # row's own token.
        seen_to = tl.maximum(tl.minimum((first_position + 1) // TILE * TILE, high // TILE * TILE), begin)
        if window is not None:
            seen_from = (first_seen(first_position + count - 1, window) + TILE - 1) // TILE * TILE
            seen_from = tl.minimum(tl.maximum(seen_from, begin), seen_to)
            softmax = attend(
                rows,
                softmax,
                (begin, seen_from),
                rule,
                units,
                cache,
                KV_HEADS,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_SIZE,
                TILE,
                True,
            )
        else:
            seen_from = begin
        softmax = attend(
            rows,
            softmax,
            (seen_from, seen_to),
            rule,
            units,
            cache,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            TILE,
            False,
        )
        largest, total, attended = attend(
            rows,
            softmax,
            (seen_to, high),
            rule,
            units,
            cache,
            KV_HEADS,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_SIZE,
            TILE,
            True,
        )
    elif VISITS:
        split = (begin + visited) & WHOLE_TILES
        span = (tl.maximum(split, low // TILE * TILE), tl.minimum(split + size, high))
        largest, total, attended = attend(
            rows, softmax, span, rule, units, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
        )
        if end - begin > size:
            # The splits before are in memory, because there are no registers for two results.
            numbers = tl.arange(0, BLOCK_M) + tl.load(zero)
            kept_rows = own + numbers
            is_row = numbers // GROUP < tl.load(item + 2)
            there = is_row & (visited > 0)
            largest_before = tl.load(statistics + kept_rows * 2, mask=there, other=float("-inf"))
            total_before = tl.load(statistics + kept_rows * 2 + 1, mask=there, other=0.0)
            kept_values = partials + kept_rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
            is_dim = (dims < HEAD_DIM)[None, :]
            before = tl.load(kept_values, mask=there[:, None] & is_dim, other=0.0)
            largest, total, kept, added = join(largest_before, total_before, largest, total)
            attended = tl.fma(attended, added[:, None], before * kept[:, None])
            if split + size < end:
                next_visited = visited + size
                tl.store(kept_values, attended, mask=is_row[:, None] & is_dim)
                tl.store(statistics + kept_rows * 2, largest, mask=is_row)
                tl.store(statistics + kept_rows * 2 + 1, total, mask=is_row)
                tl.debug_barrier()
    else:
        span = (begin, high)
        largest, total, attended = attend(
            rows, softmax, span, rule, units, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
        )
    # Computed again, because registers are scarce during the loop. The compiler does not know the zero.
    place, first_row, count = tl.load(item + 7), tl.load(item + 1), tl.load(item + 2)
    numbers = tl.arange(0, BLOCK_M) + tl.load(zero)
    row_tokens = numbers // GROUP
    heads = kv_head * GROUP + numbers % GROUP
    is_row = row_tokens < count
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    if next_visited > 0:
        pass
    elif place >= 0:
        partial = (place + row_tokens).to(tl.int64) * HEADS + heads
        tl.store(partials + partial[:, None] * HEAD_DIM + dims[None, :], attended, mask=mask)
        tl.store(statistics + partial * 2, largest, mask=is_row)
        tl.store(statistics + partial * 2 + 1, total, mask=is_row)
    else:
        attended *= normaliser(largest, total, sinks, value_scale, heads, is_row, kv_head)[:, None]
        target = ((first_row + row_tokens).to(tl.int64) * HEADS + heads) * HEAD_DIM
        tl.store(out + target[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=mask)
    return next_visited


@triton.jit(debug=CHECKED, do_not_specialize=_VARYING)
def _attend_kernel(
    out,  # [T, HQ, D]
    partials,  # [R, D] float32, and after them [R, 2]: largest score, sum of weights
    schedule,
    q,  # [T, HQ, D]
    q_stride,
    keys,  # [N, HK, S, D]
    values,  # [N, HK, S, D]
    key_scale,  # [HK]
    value_scale,  # [HK]
    num_blocks,
    block_tables,  # [B, M]
    table_stride,
    query_starts,  # [B + 1]
    num_sequences,
    num_rows,
    sinks,  # [HQ]
    scale,
    soft_cap,
    window,
    capacity,
    num_partials,
    num_results,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LIST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    VISITS: tl.constexpr,
    PLAIN: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out = softmax(scale q k^T) v for the items of a list.

    The algorithm is FlashAttention-2 (arXiv 2307.08691), with the splits of Flash-Decoding. The number of programs is
    what the device can hold. They share the items, which come longest first, in alternating order, so that all finish
    at about the same time.

    VISITS        an item may contain several splits. It merges them in order as ``_join_kernel`` does, so that the
                  result does not depend on how splits are divided among items
    PLAIN         tiles of context that every row sees whole are computed without a mask; worthwhile for large tiles
    num_partials  P
    num_results   R
    """
    HEADS: tl.constexpr = KV_HEADS * GROUP
    program, programs = tl.program_id(0), tl.num_programs(0)
    clear_padding(out, tl.load(query_starts + num_sequences), num_rows, program, programs, HEADS * HEAD_DIM)
    work_count = tl.load(schedule + COUNTS + LIST) * KV_HEADS
    items = schedule + LISTS + LIST * capacity * ITEM_WIDTH
    results = (out, partials, partials + num_results.to(tl.int64) * HEAD_DIM, schedule + ZERO)
    whole_cache = (keys, values, key_scale, value_scale, num_blocks, block_tables, table_stride)
    scoring = (sinks, scale, soft_cap, window)
    own = num_partials * HEADS + program * BLOCK_M
    start = tl.full((), 0, tl.int32)
    visited = tl.full((), 0, tl.int32)
    while start < work_count:
        work = start + tl.where(start // programs % 2 == 0, program, programs - 1 - program)
        if work < work_count:
            visited = _compute_item(
                items + work // KV_HEADS * ITEM_WIDTH,
                work % KV_HEADS,
                visited,
                own,
                results,
                (q, q_stride),
                whole_cache,
                scoring,
                KV_HEADS,
                GROUP,
                HEAD_DIM,
                BLOCK_D,
                BLOCK_SIZE,
                BLOCK_M,
                TILE,
                VISITS,
                PLAIN,
                INTERPRETED,
            )
        start += tl.where(visited > 0, 0, programs)


@triton.jit(do_not_specialize=_VARYING)
def _join_kernel(
    out,  # [T, HQ, D]
    partials,  # [R, D] float32, and after them [R, 2]: largest score, sum of weights
    schedule,
    value_scale,  # [HK]
    sinks,  # [HQ]
    capacity,
    num_partials,
    num_results,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Merge the partial results of each token and head whose context was split, in order."""
    statistics = partials + num_results.to(tl.int64) * HEAD_DIM
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    joins = schedule + LISTS + 3 * capacity * ITEM_WIDTH
    work_count = tl.load(schedule + COUNTS + 3) * HEADS
    for work in tl.range(tl.program_id(0), work_count, tl.num_programs(0), num_stages=1):
        head = work % HEADS
        token = joins + work // HEADS * JOIN_WIDTH
        row, place, stride, splits = tl.load(token), tl.load(token + 1), tl.load(token + 2), tl.load(token + 3)
        largest = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        attended = tl.full((BLOCK_D,), 0.0, tl.float32)
        for start in tl.range(0, splits, AHEAD, num_stages=1):
            # The loop is unrolled, so that the loads do not wait for one another.
            for offset in tl.static_range(AHEAD):
                there = start + offset < splits
                partial = (place + (start + offset) * stride).to(tl.int64) * HEADS + head
                split_largest = tl.load(statistics + partial * 2, mask=there, other=float("-inf"))
                split_total = tl.load(statistics + partial * 2 + 1, mask=there, other=0.0)
                part = tl.load(partials + partial * HEAD_DIM + dims, mask=there & is_dim, other=0.0)
                largest, total, kept, added = join(largest, total, split_largest, split_total)
                attended = tl.fma(part, added, attended * kept)
        attended *= normaliser(largest, total, sinks, value_scale, head, row >= 0, head // GROUP)
        target = (row.to(tl.int64) * HEADS + head) * HEAD_DIM
        tl.store(out + target + dims, attended.to(out.dtype.element_ty), mask=is_dim)
