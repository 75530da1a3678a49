"""The kernels of a mixture of experts: routing, tokens sorted by expert, grouped products, the weighted sum.

An assignment is a token with one of its experts; its number is t K + k. Assignments are sorted by expert, in ascending
order within an expert, and divided into blocks of at most BLOCK_M rows of one expert. A program of the grouped products
computes one block and reads the number of blocks on the device. Grids are bounded by T K and E alone, so one launch
fits any routes.

A row's product is accumulated over its depth in steps of BLOCK_K, independently of its block. A token's result
therefore does not depend on the batch as long as the block sizes are the same: with ``deterministic`` they come from
tables by dtype, else also by the number of tokens per expert.

Legend: T tokens, H hidden size, I intermediate size, E experts, K experts per token.
"""

import triton
import triton.language as tl

from quire_kernels.triton_runtime.debug import kernel


@triton.jit
def route_kernel(
    logits,  # [T, E]
    row_stride,
    experts,  # [T, K]
    weights,  # [T, K]
    E: tl.constexpr,
    K: tl.constexpr,
    NORMALISE: tl.constexpr,
    PADDED_E: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    """Select the K largest of softmax(logits) in descending order; the first wins among equals. Grid: T."""
    token = tl.program_id(0).to(tl.int64)
    lanes, slots = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    values = tl.load(logits + token * row_stride + lanes, mask=lanes < E, other=float("-inf")).to(tl.float32)
    powers = tl.exp(values - tl.max(values, axis=0))
    probabilities = powers / tl.sum(powers, axis=0)
    # NaN is replaced, so that even a row of NaN yields valid experts.
    left = tl.where(lanes < E, tl.where(probabilities == probabilities, probabilities, 0.0), -1.0)
    chosen = tl.zeros((PADDED_K,), tl.int64)
    shares = tl.zeros((PADDED_K,), tl.float32)
    for k in range(K):
        top = tl.max(left, axis=0)
        best = tl.min(tl.where(left == top, lanes, PADDED_E), axis=0)
        chosen = tl.where(slots == k, best.to(tl.int64), chosen)
        shares = tl.where(slots == k, top, shares)
        left = tl.where(lanes == best, -1.0, left)
    if NORMALISE:
        shares = shares / tl.sum(shares, axis=0)
    tl.store(experts + token * K + slots, chosen, mask=slots < K)
    tl.store(weights + token * K + slots, shares, mask=slots < K)


@kernel(varying=["assignments"])
def sort_kernel(
    experts,  # [T K] int64
    order,  # [T K] int32: the assignments by expert
    blocks,  # [most blocks, 3] int32: expert, first and last + 1 position of its rows in the order
    num_blocks,  # [1] int32
    assignments,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write each expert's assignments next to each other, in ascending order, and divide them into blocks.

    Each program counts all assignments, and those before its own; so one launch suffices, and none waits for another.
    Then it places CHUNK assignments and writes CHUNK blocks. Grid: the larger number of both, by CHUNK.
    """
    first = tl.program_id(0) * CHUNK
    lanes = tl.arange(0, TILE)
    counts = tl.zeros((PADDED_E,), tl.int32)
    before = tl.zeros((PADDED_E,), tl.int32)
    for start in range(0, assignments, TILE):
        places = start + lanes
        inside = places < assignments
        named = tl.load(experts + places, mask=inside, other=0)
        tl.device_assert((named >= 0) & (named < E), "fused_experts: routes name an expert that there is not")
        bins = tl.minimum(tl.maximum(named, 0), PADDED_E - 1).to(tl.int32)
        counts += tl.histogram(bins, PADDED_E, mask=inside).to(tl.int32)
        if start < first:
            before += tl.histogram(bins, PADDED_E, mask=inside & (places < first)).to(tl.int32)
    needed = (counts + (BLOCK_M - 1)) // BLOCK_M
    ends = tl.cumsum(counts, 0)
    block_ends = tl.cumsum(needed, 0)
    total = tl.sum(needed, 0)
    if first == 0:
        tl.store(num_blocks, total)

    own = first + tl.arange(0, CHUNK)
    inside = own < assignments
    named = tl.load(experts + own, mask=inside, other=0)
    named = tl.minimum(tl.maximum(named, 0), PADDED_E - 1).to(tl.int32)
    is_earlier = (named[None, :] == named[:, None]) & (own[None, :] < own[:, None])
    rank = tl.sum(is_earlier.to(tl.int32), 1)
    tl.store(order + tl.gather(ends - counts + before, named, 0) + rank, own, mask=inside)

    # From here on, own is a block.
    is_block = own < total
    expert = tl.minimum(tl.sum((block_ends[None, :] <= own[:, None]).to(tl.int32), 1), PADDED_E - 1)
    end = tl.gather(ends, expert, 0)
    row = tl.gather(ends - counts, expert, 0) + (own - tl.gather(block_ends - needed, expert, 0)) * BLOCK_M
    tl.store(blocks + own * 3, expert, mask=is_block)
    tl.store(blocks + own * 3 + 1, row, mask=is_block)
    tl.store(blocks + own * 3 + 2, tl.minimum(row + BLOCK_M, end), mask=is_block)


@triton.jit
def grouped_product_kernel(
    x,  # [T, DEPTH] when GATED, else [T K, DEPTH]
    weights,  # [E, 2 WIDTH, DEPTH] when GATED, else [E, WIDTH, DEPTH]
    out,  # [T K, WIDTH]
    order,
    blocks,
    num_blocks,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    GELU: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute the product of each block of assignments a with the weights of their expert e.

    GATED: out[a] = activation(gate[e] x[a // K]) * (up[e] x[a // K]), else out[a] = down[e] x[a]. Sums are in float32;
    float32 operands are not converted to tf32. Grid: columns by BLOCK_N, most blocks. The programs of a block are
    adjacent and share its rows; the blocks of one expert follow each other and share its weights.
    """
    block = tl.program_id(1)
    if block >= tl.load(num_blocks):
        return
    expert = tl.load(blocks + block * 3).to(tl.int64)
    rows = tl.load(blocks + block * 3 + 1) + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(blocks + block * 3 + 2)
    assigned = tl.load(order + rows, mask=inside, other=0).to(tl.int64)
    source = assigned // K if GATED else assigned
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    within = column < WIDTH
    depth = tl.arange(0, BLOCK_K)
    own = weights + expert * ((2 if GATED else 1) * WIDTH * DEPTH) + column.to(tl.int64)[None, :] * DEPTH
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    total_up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, DEPTH, BLOCK_K):
        step = start + depth
        if DEPTH % BLOCK_K == 0:
            row_mask, column_mask = inside[:, None], within[None, :]
        else:
            row_mask = inside[:, None] & (step < DEPTH)[None, :]
            column_mask = within[None, :] & (step < DEPTH)[:, None]
        values = tl.load(x + source[:, None] * DEPTH + step[None, :], mask=row_mask, other=0.0)
        first = tl.load(own + step[:, None], mask=column_mask, other=0.0)
        total = tl.dot(values, first, total, input_precision="ieee")
        if GATED:
            second = tl.load(own + WIDTH * DEPTH + step[:, None], mask=column_mask, other=0.0)
            total_up = tl.dot(values, second, total_up, input_precision="ieee")
    if GATED:
        exponent = -total
        if GELU:
            exponent *= 1.5957691216057308 * (1.0 + 0.044715 * total * total)  # 2 sqrt(2 / pi)
        # Above 88, exp exceeds the range of float32, and the quotient is 0 there anyway.
        total = total / (1.0 + tl.exp(tl.minimum(exponent, 88.0))) * total_up
    target = out + assigned[:, None] * WIDTH + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=inside[:, None] & within[None, :])


@triton.jit
def sum_kernel(
    made,  # [T K, H]
    weights,  # [T, K]
    out,  # [T, H]
    H: tl.constexpr,
    K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute out[t] = sum over k of weights[t, k] made[t K + k], in float32 in the order of k.

    Grid: T, columns by TILE.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < H
    total = tl.zeros((TILE,), tl.float32)
    for k in range(K):
        assigned = token * K + k
        row = tl.load(made + assigned * H + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + assigned) * row
    tl.store(out + token * H + column, total.to(out.dtype.element_ty), mask=inside)
