"""linear in Triton: tiles of one size, and K divided into splits, both determined by the weight's shape alone.

y = x W^T + bias. The tensor cores accumulate the product of one tile and one split, from zero and in ascending order of
k; the splits' sums are then added in float32, also in ascending order. With many rows, a program processes the splits
of its tile one after another. With few rows, there are fewer tiles than the device has multiprocessors, and a program
processes one split: the sums go through memory to a second kernel, which adds them in the same order. Both variants
give the same bits, so the choice may depend on the number of rows, while the instructions and the order of additions do
not (He and Thinking Machines Lab, "Defeating Nondeterminism in LLM Inference", 2025).

Legend: T rows, K inputs, N outputs, C splits of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime.config import LaunchConfig, config_for
from quire_kernels.triton_runtime.debug import kernel
from quire_kernels.triton_runtime.device import device_properties, require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches
from quire_kernels.triton_runtime.target import Target

_INTERPRETED = tl.constexpr(INTERPRETED)
_PROGRAMS = 256
"""The number of programs for which a single tile of rows is divided into splits: two per multiprocessor of a Hopper."""
_SHORTEST_SPLIT = 256
_TILES_PER_GROUP = tl.constexpr(8)
"""The number of row tiles whose neighbouring programs share the weights."""


@triton.jit
def _multiply_add(left, right, product):
    if _INTERPRETED:
        # The interpreter's own product, NumPy's, rounds a row depending on its position.
        wide = left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :]
        return product + tl.sum(wide, axis=1)
    return tl.dot(left, right, product, input_precision="ieee")


@kernel(varying=["rows"])
def _multiply_kernel(
    x,  # [T, K]
    weight,  # [N, K]
    bias,  # [N], not read unless BIAS
    out,  # [T, N]; float32 [C, T, N] if APART
    rows,
    inputs,
    outputs,
    x_stride,
    split_inputs,  # of a split, a multiple of BLOCK_K
    C: tl.constexpr,
    APART: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    m_tiles, n_tiles = tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N)
    group, within = tl.program_id(0) // (_TILES_PER_GROUP * n_tiles), tl.program_id(0) % (_TILES_PER_GROUP * n_tiles)
    first_tile = group * _TILES_PER_GROUP
    group_tiles = tl.minimum(m_tiles - first_tile, _TILES_PER_GROUP)
    row = (first_tile + within % group_tiles).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = (within // group_tiles).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    # Indices beyond the last row and column read the last one again: cheaper than a mask, and the results are not
    # stored.
    x_rows = x + tl.minimum(row, rows - 1)[:, None] * x_stride
    weight_rows = weight + tl.minimum(column, outputs - 1)[None, :] * inputs
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    first_split = tl.program_id(1) if APART else 0
    for split in range(first_split, first_split + (1 if APART else C)):
        product = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        start = split * split_inputs
        for begin in range(start, tl.minimum(start + split_inputs, inputs), BLOCK_K):
            k = begin + tl.arange(0, BLOCK_K)
            if EVEN_K:
                left = tl.load(x_rows + k[None, :])
                right = tl.load(weight_rows + k[:, None])
            else:
                left = tl.load(x_rows + k[None, :], mask=k[None, :] < inputs, other=0.0)
                right = tl.load(weight_rows + k[:, None], mask=k[:, None] < inputs, other=0.0)
            product = _multiply_add(left, right, product)
        total += product
    inside = (row[:, None] < rows) & (column[None, :] < outputs)
    place = row[:, None] * outputs + column[None, :]
    if APART:
        place += tl.program_id(1).to(tl.int64) * rows * outputs
    elif BIAS:
        total += tl.load(bias + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@kernel(varying=["elements"])
def _add_up_kernel(
    sums,  # [C, T, N] float32
    bias,  # [N], not read unless BIAS
    out,  # [T, N]
    elements,  # T * N
    outputs,
    C: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(C):
        total += tl.load(sums + split * elements.to(tl.int64) + place, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + place % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the product; with few rows this needs float32 [C, T, N] of additional memory."""
    require_device("linear", x.device)
    (rows, inputs), outputs = x.shape, weight.shape[0]
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    target = target_of(x.device)
    config = config_for("linear.multiply", target, _key(x.dtype))
    splits, split_inputs = cut(inputs, outputs, config)
    tiles = cdiv(rows, config.blocks["BLOCK_M"]) * cdiv(outputs, config.blocks["BLOCK_N"])
    apart = splits > 1 and 2 * tiles <= device_properties(x.device).multiprocessors
    sums = torch.empty((splits, rows, outputs), dtype=torch.float32, device=x.device) if apart else out
    given_bias = x if bias is None else bias  # An argument that is not read still needs a pointer.
    multiply = _multiply(inputs, splits, x.dtype, (apart, bias is not None), target)
    multiply(
        (tiles, splits if apart else 1),
        x,
        weight,
        given_bias,
        sums,
        rows,
        inputs,
        outputs,
        x.stride(0),
        split_inputs,
    )
    if apart:
        add_up = _add_up(splits, bias is not None, target)
        add_up((cdiv(out.numel(), add_up.constants["BLOCK"]),), sums, given_bias, out, out.numel(), outputs)
    return out


@launches
def _multiply(inputs: int, splits: int, dtype: torch.dtype, variant: tuple[bool, bool], target: Target) -> Launch:
    """Return the launch of the product. ``variant``: whether splits are apart, and whether there is a bias."""
    config = config_for("linear.multiply", target, _key(dtype))
    even = inputs % config.blocks["BLOCK_K"] == 0
    apart, biased = variant
    return Launch(_multiply_kernel, C=splits, APART=apart, BIAS=biased, EVEN_K=even, **config.options)


@launches
def _add_up(splits: int, biased: bool, target: Target) -> Launch:
    return Launch(_add_up_kernel, C=splits, BIAS=biased, **config_for("linear.add_up", target).options)


def cut(inputs: int, outputs: int, config: LaunchConfig) -> tuple[int, int]:
    """Return the number of splits of K, and the inputs of each split except the last.

    Both depend on the weight's shape, never on the rows.
    """
    n_tiles = cdiv(outputs, config.blocks["BLOCK_N"])
    wanted = max(min(_PROGRAMS // n_tiles, inputs // _SHORTEST_SPLIT), 1)
    block = config.blocks["BLOCK_K"]
    split_inputs = max(cdiv(cdiv(inputs, wanted), block), 1) * block
    return max(cdiv(inputs, split_inputs), 1), split_inputs


def _key(dtype: torch.dtype) -> str:
    return f"bits={8 * dtype.itemsize}"
