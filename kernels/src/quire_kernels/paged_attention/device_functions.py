"""Device functions of the Triton kernels of ``paged_attention``: queries, the cache, online softmax.

Scores are in units of log2, so that a weight is one exp2. Every sum whose rounding could depend on a compiler's
contraction is an explicit fma: a result must have the same bits in every kernel.

``tl.cdiv`` and ``tl.zeros`` are written out, because a function call costs the interpreter milliseconds.

Legend: HK KV heads, D head dim, S block size. A *tile* is TILE tokens of the context, a *split* a range of tiles that
one program processes, a row one query token and one of the query heads that share a KV head.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen(position, window):
    """Return the first token that a query at ``position`` sees."""
    if window is None:
        return position * 0
    else:
        return tl.maximum(position + 1 - window, 0)


@triton.jit
def load_rows(
    q,
    q_stride,
    first_row,
    count,
    kv_head,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return a query tile [BLOCK_M, BLOCK_D], and each row's token, its query head, and whether the row is valid.

    The tile has ``count`` tokens, from row ``first_row`` of q on; a row's token is counted from there.
    """
    rows = tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = tokens < count
    dims = tl.arange(0, BLOCK_D)
    places = (first_row + tokens).to(tl.int64) * q_stride + heads * HEAD_DIM
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    queries = tl.load(q + places[:, None] + dims[None, :], mask=mask, other=0.0)
    # The interpreter multiplies the bits of bfloat16 as if they were integers.
    return queries.to(tl.float32) if INTERPRETED else queries, tokens, heads, is_row


@triton.jit
def rows_for(rows, cache_type: tl.constexpr):
    """Return a query tile in the type in which it is multiplied by a cache of ``cache_type``.

    This is float16 if the cache is float8 and the queries are bfloat16: GPUs convert pairs of float8 to float16 by one
    instruction, but to bfloat16 only through float32. Both factors are more precise in float16.
    """
    if cache_type.primitive_bitwidth == 8 and rows.dtype == tl.bfloat16:
        return tl.minimum(tl.maximum(rows.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    else:
        return rows


@triton.jit
def score_units(scale, soft_cap, key_scale, kv_head):
    """Return the factor that turns q k^T into scores in units of log2, and the soft cap in these units.

    With a soft cap, the factor produces the argument of the tanh instead.
    """
    if key_scale is not None:
        scale *= tl.load(key_scale + kv_head)
    if soft_cap is None:
        return scale * LOG2_E, 0.0
    else:
        return scale / soft_cap, soft_cap * LOG2_E


@triton.jit
def cap_scores(scores, cap):
    """Return cap tanh(scores) as 1 - 2 / (e^2x + 1), which has the right limits if e^2x overflows."""
    return cap - 2.0 * cap / (tl.exp2(scores * (2.0 * LOG2_E)) + 1.0)


@triton.jit
def load_tile(
    cache,
    start,
    columns,
    inside,
    dtype: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return keys, transposed, and values of a tile of tokens from ``start``: [BLOCK_D, TILE] and [TILE, BLOCK_D]."""
    keys, values, table, num_blocks = cache
    BLOCK_STRIDE: tl.constexpr = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    tokens = start + columns
    if BLOCK_SIZE % TILE == 0:
        # The tile lies within one block, and at least one of its tokens is read.
        block = tl.load(table + start // BLOCK_SIZE)
        is_valid = (block >= 0) & (block < num_blocks)
        places = block.to(tl.int64) * BLOCK_STRIDE + (start % BLOCK_SIZE + columns) * HEAD_DIM
    else:
        if MASKED:
            blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0)
        else:
            blocks = tl.load(table + tokens // BLOCK_SIZE)
        is_valid = (blocks >= 0) & (blocks < num_blocks)
        places = blocks.to(tl.int64) * BLOCK_STRIDE + (tokens % BLOCK_SIZE) * HEAD_DIM
    tl.device_assert(is_valid, "paged_attention: block_tables name a block outside the cache")
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    key_places = keys + places[None, :] + dims[:, None]
    value_places = values + places[:, None] + dims[None, :]
    if MASKED:
        # Data beyond the sequence may be NaN, and 0 times NaN is NaN.
        k = tl.load(key_places, mask=inside[None, :] & is_dim[:, None], other=0.0)
        v = tl.load(value_places, mask=inside[:, None] & is_dim[None, :], other=0.0)
    elif HEAD_DIM == BLOCK_D:
        k = tl.load(key_places)
        v = tl.load(value_places)
    else:
        k = tl.load(key_places, mask=is_dim[:, None], other=0.0)
        v = tl.load(value_places, mask=is_dim[None, :], other=0.0)
    return k.to(dtype), v.to(dtype)


@triton.jit
def attend(
    rows,
    softmax,
    span,
    rule,
    scoring,
    cache,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add tiles of context to the online softmax of a query tile (arXiv 1805.02867).

    rows     [BLOCK_M, BLOCK_D] the queries
    softmax  largest score so far and sum of weights exp2(score - largest), [BLOCK_M] each, and the weighted values,
             [BLOCK_M, BLOCK_D]; the updated values are returned
    span     first token of the first tile, and the token before which the last tile starts
    rule     tokens low .. high - 1 are valid; MASKED if tiles reach beyond them or are partly hidden from some rows;
             [BLOCK_M] position of each row's token in the sequence; window
    scoring  unit and cap of ``score_units``; the soft cap, None if absent
    cache    keys and values from the KV head on; the sequence's row of the block tables; blocks of the cache
    """
    largest, total, attended = softmax
    low, high, positions, window = rule
    unit, cap, soft_cap = scoring
    # Scores without a cap stay in units of q k^T, and are scaled when they become weights.
    IS_RAW: tl.constexpr = soft_cap is None
    columns = tl.arange(0, TILE)
    for start in tl.range(span[0], span[1], TILE):
        start = tl.multiple_of(start, TILE)
        tokens = start + columns
        inside = (tokens >= low) & (tokens < high)
        k, v = load_tile(
            cache, start, columns, inside, rows.dtype, KV_HEADS, HEAD_DIM, BLOCK_D, BLOCK_SIZE, TILE, MASKED
        )
        scores = tl.dot(rows, k, input_precision="ieee")
        if soft_cap is not None:
            scores = cap_scores(scores * unit, cap)
        if MASKED:
            seen = tokens[None, :] <= positions[:, None]
            if window is not None:
                seen &= tokens[None, :] > positions[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.max(scores, 1) * unit if IS_RAW else tl.max(scores, 1)
        grown = tl.maximum(largest, highest)
        # A row that has seen no token has -inf, and -inf - -inf is NaN.
        shift = tl.where(grown == float("-inf"), 0.0, grown) if MASKED else grown
        lowered = tl.fma(scores, unit, -shift[:, None]) if IS_RAW else scores - shift[:, None]
        weights = tl.exp2(lowered)
        kept = tl.exp2(largest - shift)
        total = tl.fma(total, kept, tl.sum(weights, 1))
        attended = tl.dot(weights.to(v.dtype), v, attended * kept[:, None], input_precision="ieee")
        largest = grown
    return largest, total, attended


@triton.jit
def fresh_softmax(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the softmax state over no tokens."""
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return largest, tl.full((BLOCK_M,), 0.0, tl.float32), tl.full((BLOCK_M, BLOCK_D), 0.0, tl.float32)


@triton.jit
def join(largest, total, other_largest, other_total):
    """Return the softmax of two splits as one: largest score, sum of weights, and the factors of the two results.

    The results are combined by fma(other, added, result * kept).
    """
    grown = tl.maximum(largest, other_largest)
    shift = tl.where(grown == float("-inf"), 0.0, grown)
    kept = tl.exp2(largest - shift)
    added = tl.exp2(other_largest - shift)
    return grown, tl.fma(other_total, added, total * kept), kept, added


@triton.jit
def normaliser(largest, total, sinks, value_scale, heads, is_row, kv_head):
    """Return the final factor of a row's weighted values; 0 if the row has seen no token.

    A sink is one more score without a value.
    """
    factor = tl.where(total > 0.0, 1.0, 0.0)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_row, other=float("-inf")).to(tl.float32) * LOG2_E
        largest, total, kept, _ = join(largest, total, sink, tl.where(is_row, 1.0, 0.0))
        factor *= kept
    if value_scale is not None:
        factor *= tl.load(value_scale + kv_head)
    return factor / tl.where(total > 0.0, total, 1.0)


@triton.jit
def clear_padding(out, first, num_rows, program, num_programs, ROW: tl.constexpr):
    """Write zeros to the padding rows, because their readers must not find NaN."""
    for row in tl.range(first + program, num_rows, num_programs):
        for start in tl.static_range(0, ROW, 1024):
            place = start + tl.arange(0, 1024)
            target = out + row * tl.full((), ROW, tl.int64) + place
            tl.store(target, tl.full((1024,), 0.0, out.dtype.element_ty), mask=place < ROW)
