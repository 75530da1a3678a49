"""Low-rank adapters of a linear layer: each token adds the product of its own adapter's two small matrices.

y[t] += B[s] (A[s] x[t]), where s is the slot of token t's adapter (Hu et al., "LoRA", 2021). A layer's slots hold many
adapters at once, and the tokens of a step are grouped by slot, so that a matrix is read once for a block of tokens
(Chen et al., "Punica", and Sheng et al., "S-LoRA", 2023). The first product is *shrink*, the second *expand*.

A linear layer may join several projections of one input (queries, keys and values): its *parts*. Each part has matrices
of its own in every adapter. For tensor parallelism, a layer that is divided by outputs divides ``b`` by N and copies
``a``, and one that is divided by inputs divides ``a`` by K and copies ``b``; nothing else changes.

Legend: T tokens, K inputs, N outputs, S slots, R the largest rank, P parts, G tokens with an adapter, C blocks.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation

BLOCK_ROWS = 16
"""The largest number of tokens in a block, for which an adapter's matrices are read once."""
RANK_UNIT = 8
"""The largest rank of a layer's slots is a multiple of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSlots:
    """The matrices of all adapters for one linear layer.

    Rows of ``a`` and ``b`` from an adapter's rank up to the next multiple of ``RANK_UNIT`` must be 0; those above it
    are never read. A part whose rank is 0 has no adapter.
    """

    a: Tensor  # [S, P * R, K]: part p has the rows from p * R on
    b: Tensor  # [S, R, N], with the scale of the adapter
    ranks: Tensor  # [S, P] int32
    ends: Tensor  # [P] int32: the end of each part among the N outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGroups:
    """The tokens of a step that have an adapter, in blocks of at most ``BLOCK_ROWS`` tokens of one slot."""

    order: Tensor  # [G] int32: the tokens, by slot
    blocks: Tensor  # [C, 3] int32: slot, first and last + 1 place in the order; a slot of -1 is an empty block


def allocate_slots(
    *,
    slots: int,
    max_rank: int,
    inputs: int,
    parts: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> LayerSlots:
    """Return empty slots for a layer with ``inputs`` and with ``parts`` outputs; the memory is in use from now on."""
    rank = -(-max_rank // RANK_UNIT) * RANK_UNIT
    made = LayerSlots(
        a=torch.empty((slots, len(parts) * rank, inputs), dtype=dtype, device=device),
        b=torch.empty((slots, rank, sum(parts)), dtype=dtype, device=device),
        ranks=torch.zeros((slots, len(parts)), dtype=torch.int32, device=device),
        ends=torch.tensor(np.cumsum(parts), dtype=torch.int32, device=device),
    )
    made.a.zero_()
    made.b.zero_()
    return made


def group_tokens(slots: np.ndarray) -> TokenGroups | None:
    """Return the groups of tokens whose slots are ``slots`` [T], -1 for none; None if no token has an adapter."""
    order = np.flatnonzero(slots >= 0)
    if not len(order):
        return None
    own = slots[order]
    if np.any(own[1:] < own[:-1]):
        by_slot = np.argsort(own, kind="stable")
        order, own = order[by_slot], own[by_slot]
    starts = np.flatnonzero(np.concatenate(([True], own[1:] != own[:-1])))
    counts = np.diff(np.append(starts, len(own)))
    per_group = -(-counts // BLOCK_ROWS)
    group = np.repeat(np.arange(len(starts)), per_group)  # [C]
    place = np.arange(len(group)) - np.repeat(np.cumsum(per_group) - per_group, per_group)  # of a block in its group
    first = starts[group] + place * BLOCK_ROWS
    blocks = np.stack((own[first], first, np.minimum(first + BLOCK_ROWS, starts[group] + counts[group])), axis=1)
    return TokenGroups(order=torch.from_numpy(order.astype(np.int32)), blocks=torch.from_numpy(blocks.astype(np.int32)))


def most_blocks(tokens: int, slots: int) -> int:
    """Return the largest number of blocks of a step's tokens: each slot leaves at most one block unfilled."""
    return min(tokens, tokens // BLOCK_ROWS + slots)


def add_adapters(y: Tensor, x: Tensor, layer: LayerSlots, groups: TokenGroups) -> None:
    """Add to each token's row of ``y`` what its adapter makes of its row of ``x``, in place.

    y  [T, N], rows at any stride: the output of the linear layer
    x  [T, K], rows at any stride, dtype of y: its input

    Sums are in float32, the result is added to ``y`` and rounded once. A row's result has the same bits in every batch.
    Raise ArgumentError on other shapes, strides, dtypes or devices.
    """
    check_storage("add_adapters", "y", y)
    check_storage("add_adapters", "x", x)
    slots, rank, outputs = layer.b.shape
    parts = layer.ends.shape[0]
    if y.dim() != 2 or x.dim() != 2 or y.shape[0] != x.shape[0] or y.dtype != x.dtype:
        refuse("add_adapters", "x", f"is {x.dtype} {tuple(x.shape)}; y is {y.dtype} {tuple(y.shape)}")
    if y.shape[1] != outputs:
        refuse("add_adapters", "y", f"has {y.shape[1]} columns; the layer has {outputs} outputs")
    check_dense("add_adapters", "a", layer.a, y.dtype, (slots, parts * rank, x.shape[1]))
    check_dense("add_adapters", "b", layer.b, y.dtype, (slots, rank, outputs))
    check_dense("add_adapters", "ranks", layer.ranks, torch.int32, (slots, parts))
    check_dense("add_adapters", "order", groups.order, torch.int32, (groups.order.shape[0],))
    check_dense("add_adapters", "blocks", groups.blocks, torch.int32, (groups.blocks.shape[0], 3))
    check_device("add_adapters", y, x=x, a=layer.a, b=layer.b, order=groups.order)
    implementation("lora", y.device.type).add_adapters(y, x, layer, groups)
