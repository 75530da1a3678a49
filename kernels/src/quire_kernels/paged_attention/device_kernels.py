"""The three Triton kernels of ``paged_attention``.

``_attend_kernel`` processes sequences of many queries: a program is a query tile and a KV head. ``_split_kernel``
processes sequences of few queries, as in decoding: their contexts are split, so that few sequences occupy the whole
device, and ``_join_kernel`` merges the partial results of a token. A sequence's own number of queries decides which of
the two processes it. In a mixed batch each kernel skips the other's sequences.

Legend: T query tokens, B sequences, HQ/HK query/KV heads, D head dim, S block size, M blocks per sequence, P partial
results.
"""

import triton
import triton.language as tl

from quire_kernels.paged_attention.device_functions import (
    attend,
    clear_padding,
    find_item,
    first_seen,
    fresh_softmax,
    join,
    load_rows,
    load_slopes,
    normaliser,
    score_units,
    split_context,
)
from quire_kernels.triton_runtime.debug import CHECKED

# These numbers change from step to step. If Triton specialized on 1 or multiples of 16, it would compile during
# serving.
_VARYING = [
    "num_sequences",
    "num_rows",
    "num_blocks",
    "table_stride",
    "window",
    "max_splits",
    "split_tokens",
    "max_queries",
]


@triton.jit(debug=CHECKED, do_not_specialize=_VARYING)
def _attend_kernel(
    out,  # [T, HQ, D]
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
    context_lens,  # [B]
    num_sequences,
    num_rows,
    sinks,  # [HQ]
    alibi_slopes,  # [HQ]
    scale,
    soft_cap,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out = softmax(scale q k^T) v for sequences of more than SHORT queries.

    The algorithm is FlashAttention-2 (arXiv 2307.08691). The grid has HK times at least as many programs as there are
    query tiles; the last tiles, which see most tokens, come first. Tiles of context that no row sees are not read, and
    only those at the edges of the visible range are masked.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    program = tl.program_id(1) * KV_HEADS + kv_head
    clear_padding(
        out,
        tl.load(query_starts + num_sequences),
        num_rows,
        program,
        tl.num_programs(1) * KV_HEADS,
        KV_HEADS * GROUP * HEAD_DIM,
    )
    lengths = (query_starts, context_lens, num_sequences)
    sequence, tile, _ = find_item(
        tl.num_programs(1) - 1 - tl.program_id(1), lengths, (window, 1, TILE), SHORT, BLOCK_Q, False, True, TILE, False
    )
    if sequence >= num_sequences:
        return
    first_query = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_query
    before = tl.load(context_lens + sequence) - query_len
    rows, row_tokens, heads, is_row = load_rows(
        q, q_stride, first_query, query_len, tile, kv_head, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, INTERPRETED
    )
    positions = before + row_tokens
    slopes = load_slopes(alibi_slopes, heads, is_row)
    unit, cap = score_units(scale, soft_cap, key_scale, kv_head)
    head_place = kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    cache = (keys + head_place, values + head_place, table, num_blocks)

    first_position = before + tile * BLOCK_Q
    high = before + tl.minimum(tile * BLOCK_Q + BLOCK_Q, query_len)
    low = first_seen(first_position, window)
    # Every row sees all of the tiles from the one after the last row's first visible token to the first row's own
    # token.
    begin = low // TILE * TILE
    seen_to = tl.maximum((first_position + 1) // TILE * TILE, begin)
    seen_from = tl.minimum((first_seen(high - 1, window) + TILE - 1) // TILE * TILE, seen_to)
    rule = (low, high, positions, window)
    scoring = (unit, cap, soft_cap, slopes, alibi_slopes)
    softmax = fresh_softmax(BLOCK_M, BLOCK_D)
    if window is not None:
        softmax = attend(
            rows, softmax, (begin, seen_from), rule, scoring, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
        )
    softmax = attend(
        rows, softmax, (seen_from, seen_to), rule, scoring, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, False
    )
    largest, total, attended = attend(
        rows, softmax, (seen_to, high), rule, scoring, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
    )
    attended *= normaliser(largest, total, sinks, value_scale, heads, is_row, kv_head)[:, None]
    dims = tl.arange(0, BLOCK_D)
    places = ((first_query + row_tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads) * HEAD_DIM
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    tl.store(out + places[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=mask)


@triton.jit(debug=CHECKED, do_not_specialize=_VARYING)
def _split_kernel(
    out,  # [T, HQ, D]
    partials,  # [P, HQ, D] float32, and after them [P, HQ, 2]: largest score, sum of weights
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
    context_lens,  # [B]
    num_sequences,
    num_rows,
    sinks,  # [HQ]
    alibi_slopes,  # [HQ]
    scale,
    soft_cap,
    window,
    max_splits,
    split_tokens,
    max_queries,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SHORT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    FIXED: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute out as ``_attend_kernel`` does, for sequences of up to SHORT queries, one split of the context per item.

    This is Flash-Decoding. A sequence with one split gets its result here; the splits of another sequence write partial
    results: [B, splits, queries], ``max_splits`` and ``max_queries`` wide. The number of programs is what the device
    can hold, and they share the items.

    With FIXED splits this kernel processes every sequence: a tile of a long one visits all its splits and merges them
    as ``_join_kernel`` does, so that a token's result does not depend on the number of queries in the step. In this
    mode a sequence of more than ``max_queries`` is long, because there may be room for fewer partial results only.
    """
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = KV_HEADS * GROUP
    clear_padding(
        out, tl.load(query_starts + num_sequences), num_rows, tl.program_id(0), tl.num_programs(0), HEADS * HEAD_DIM
    )
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    lengths = (query_starts, context_lens, num_sequences)
    splitting = (window, max_splits, split_tokens)
    statistics = partials + num_sequences.to(tl.int64) * max_splits * max_queries * (HEADS * HEAD_DIM)
    short = max_queries if FIXED else SHORT
    num_items = find_item(0, lengths, splitting, short, BLOCK_Q, True, FIXED, TILE, FIXED)[2]
    for work in tl.range(tl.program_id(0), num_items * KV_HEADS, tl.num_programs(0), num_stages=1):
        kv_head = work % KV_HEADS
        sequence, place, _ = find_item(work // KV_HEADS, lengths, splitting, short, BLOCK_Q, True, FIXED, TILE, FIXED)
        first_query = tl.load(query_starts + sequence)
        query_len = tl.load(query_starts + sequence + 1) - first_query
        context_len = tl.load(context_lens + sequence)
        origin, size, splits = split_context(query_len, context_len, splitting, TILE, FIXED)
        is_short = query_len <= short
        tile = place // splits if not FIXED else tl.where(is_short, place // splits, place)
        split = place % splits
        rows, row_tokens, heads, is_row = load_rows(
            q, q_stride, first_query, query_len, tile, kv_head, GROUP, HEAD_DIM, BLOCK_D, BLOCK_M, INTERPRETED
        )
        before = context_len - query_len
        positions = before + row_tokens
        slopes = load_slopes(alibi_slopes, heads, is_row)
        unit, cap = score_units(scale, soft_cap, key_scale, kv_head)
        high = tl.minimum(before + tile * BLOCK_Q + BLOCK_Q, context_len)
        low = first_seen(before + tile * BLOCK_Q, window)
        head_place = kv_head * (BLOCK_SIZE * HEAD_DIM)
        table = block_tables + sequence.to(tl.int64) * table_stride
        cache = (keys + head_place, values + head_place, table, num_blocks)
        rule = (low, high, positions, window)
        scoring = (unit, cap, soft_cap, slopes, alibi_slopes)
        first_tile = low // TILE * TILE
        softmax = fresh_softmax(BLOCK_M, BLOCK_D)
        if FIXED:
            largest, total, attended = softmax
            is_all = query_len > short
            for i in tl.range(tl.where(is_all, 0, split), tl.where(is_all, splits, split + 1), num_stages=1):
                begin = origin + i * size
                span = (tl.maximum(begin, first_tile), tl.minimum(begin + size, high))
                part = fresh_softmax(BLOCK_M, BLOCK_D)
                part_largest, part_total, part_attended = attend(
                    rows, part, span, rule, scoring, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
                )
                largest, total, kept, added = join(largest, total, part_largest, part_total)
                attended = tl.fma(part_attended, added[:, None], attended * kept[:, None])
        else:
            begin = origin + split * size
            span = (tl.maximum(begin, first_tile), tl.minimum(begin + size, high))
            largest, total, attended = attend(
                rows, softmax, span, rule, scoring, cache, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, True
            )
        mask = is_row[:, None] & is_dim[None, :]
        if is_short & (splits > 1):
            partial = (sequence.to(tl.int64) * max_splits + split) * max_queries + row_tokens
            partial = partial * HEADS + heads
            tl.store(partials + partial[:, None] * HEAD_DIM + dims[None, :], attended, mask=mask)
            tl.store(statistics + partial * 2, largest, mask=is_row)
            tl.store(statistics + partial * 2 + 1, total, mask=is_row)
        else:
            attended *= normaliser(largest, total, sinks, value_scale, heads, is_row, kv_head)[:, None]
            target = ((first_query + row_tokens).to(tl.int64) * HEADS + heads) * HEAD_DIM
            tl.store(out + target[:, None] + dims[None, :], attended.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_VARYING)
def _join_kernel(
    out,  # [T, HQ, D]
    partials,  # [P, HQ, D] float32, and after them [P, HQ, 2]: largest score, sum of weights
    value_scale,  # [HK]
    query_starts,  # [B + 1]
    context_lens,  # [B]
    sinks,  # [HQ]
    window,
    max_splits,
    split_tokens,
    max_queries,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SHORT: tl.constexpr,
    TILE: tl.constexpr,
    AHEAD: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Merge the partial results of each token and head whose context was split, in order."""
    sequence = tl.program_id(0) // max_queries
    token = tl.program_id(0) % max_queries
    head = tl.program_id(1)
    first_query = tl.load(query_starts + sequence)
    query_len = tl.load(query_starts + sequence + 1) - first_query
    if (token >= query_len) | (query_len > (max_queries if FIXED else SHORT)):
        return
    splitting = (window, max_splits, split_tokens)
    splits = split_context(query_len, tl.load(context_lens + sequence), splitting, TILE, FIXED)[2]
    if splits == 1:
        return
    num_sequences = tl.num_programs(0) // max_queries
    statistics = partials + num_sequences.to(tl.int64) * max_splits * max_queries * (HEADS * HEAD_DIM)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    attended = tl.full((BLOCK_D,), 0.0, tl.float32)
    for start in tl.range(0, splits, AHEAD, num_stages=1):
        # The loop is unrolled, so that the loads do not wait for one another.
        for offset in tl.static_range(AHEAD):
            split = start + offset
            there = split < splits
            partial = ((sequence.to(tl.int64) * max_splits + split) * max_queries + token) * HEADS + head
            split_largest = tl.load(statistics + partial * 2, mask=there, other=float("-inf"))
            split_total = tl.load(statistics + partial * 2 + 1, mask=there, other=0.0)
            values = tl.load(partials + partial * HEAD_DIM + dims, mask=there & is_dim, other=0.0)
            largest, total, kept, added = join(largest, total, split_largest, split_total)
            attended = tl.fma(values, added, attended * kept)
    attended *= normaliser(largest, total, sinks, value_scale, head, token < query_len, head // GROUP)
    target = ((first_query + token).to(tl.int64) * HEADS + head) * HEAD_DIM
    tl.store(out + target + dims, attended.to(out.dtype.element_ty), mask=is_dim)
