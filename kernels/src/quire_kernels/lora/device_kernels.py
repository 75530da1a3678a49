"""The two products of low-rank adapters on a GPU: shrink, then expand, over the same blocks of tokens of one slot.

A block has at most BLOCK_M tokens. Grids are bounded by the number of blocks alone, and a block whose slot is -1 ends
at once, so that one captured launch fits any grouping of as many tokens. The depth of shrink is divided into splits of
DEPTH inputs, whose sums expand adds in their order: few tokens thus use many multiprocessors without atomic additions.
A row is summed in the same order wherever it is in a block, so its result does not depend on the batch.

Legend: T tokens, K inputs, N outputs, S slots, R largest rank, P parts, G tokens with an adapter, C blocks, D splits.
"""

import triton
import triton.language as tl

from quire_kernels.triton_runtime.debug import kernel


@kernel
def shrink_kernel(
    x,  # [T, K]
    x_stride,
    a,  # [S, P R, K]
    ranks,  # [S, P]
    order,  # [G]
    blocks,  # [C, 3]
    shrunk,  # [G, D, P, R] float32
    num_slots,
    K: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """Multiply the rows of a block by a part's A, over one split of the inputs. Grid: C, D P, rank tiles."""
    tl.static_assert(DEPTH % BLOCK_K == 0, "a split has whole blocks of inputs")
    block = blocks + tl.program_id(0) * 3
    slot = tl.load(block).to(tl.int64)
    if slot < 0:
        return
    tl.device_assert(slot < num_slots, "add_adapters: blocks name a slot that there is not")
    part, split = tl.program_id(1) % P, tl.program_id(1) // P
    rank = tl.load(ranks + slot * P + part)
    first = tl.program_id(2) * BLOCK_R
    if first >= rank:
        return
    place = tl.load(block + 1) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(block + 2)
    token = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    row = first + tl.arange(0, BLOCK_R)
    used = row < rank
    rows = a + ((slot * P + part) * R + row.to(tl.int64)) * K
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    for start in range(split * DEPTH, tl.minimum((split + 1) * DEPTH, K), BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        within = column < K
        values = tl.load(
            x + token[:, None] * x_stride + column[None, :], mask=inside[:, None] & within[None, :], other=0.0
        )
        factors = tl.load(rows[None, :] + column[:, None], mask=used[None, :] & within[:, None], other=0.0)
        total = tl.dot(values, factors, total, input_precision="ieee")
    splits = tl.num_programs(1) // P
    target = shrunk + ((place.to(tl.int64) * splits + split) * P + part)[:, None] * R + row[None, :]
    tl.store(target, total, mask=inside[:, None] & used[None, :])


@triton.jit
def expand_kernel(
    y,  # [T, N]
    y_stride,
    b,  # [S, R, N]
    ranks,  # [S, P]
    ends,  # [P]
    order,  # [G]
    blocks,  # [C, 3]
    shrunk,  # [G, D, P, R] float32
    N: tl.constexpr,
    P: tl.constexpr,
    R: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Add the products of a block's sums and B to some columns of its rows. Grid: C, columns by BLOCK_N."""
    block = blocks + tl.program_id(0) * 3
    slot = tl.load(block).to(tl.int64)
    if slot < 0:
        return
    place = tl.load(block + 1) + tl.arange(0, BLOCK_M)
    inside = place < tl.load(block + 2)
    low = tl.program_id(1) * BLOCK_N
    column = low + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # The columns of parts that have an adapter; the others are not written.
    adapted = tl.zeros((BLOCK_N,), tl.int32)
    begin = tl.full((), 0, tl.int32)
    for part in tl.static_range(P):
        end = tl.load(ends + part)
        rank = tl.load(ranks + slot * P + part)
        if (rank > 0) & (begin < low + BLOCK_N) & (end > low):
            own = (column >= begin) & (column < end)
            adapted = tl.where(own, 1, adapted)
            for first in range(0, rank, BLOCK_R):
                row = first + tl.arange(0, BLOCK_R)
                used = row < rank
                sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for split in range(SPLITS):
                    line = (place.to(tl.int64) * SPLITS + split) * P + part
                    source = shrunk + line[:, None] * R + row[None, :]
                    sums += tl.load(source, mask=inside[:, None] & used[None, :], other=0.0)
                factors = tl.load(
                    b + (slot * R + row.to(tl.int64))[:, None] * N + column[None, :],
                    mask=used[:, None] & own[None, :],
                    other=0.0,
                )
                total = tl.dot(sums, factors.to(tl.float32), total, input_precision="ieee")
        begin = end
    token = tl.load(order + place, mask=inside, other=0).to(tl.int64)
    target = y + token[:, None] * y_stride + column[None, :]
    mask = inside[:, None] & (adapted > 0)[None, :]
    before = tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, (before + total).to(y.dtype.element_ty), mask=mask)
