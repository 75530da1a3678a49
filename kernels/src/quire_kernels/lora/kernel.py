"""Low-rank adapters in Triton: two launches per layer, without a wait for the device.

The sums between the launches come from torch's allocator, which also works during the capture of CUDA graphs. The
number of launched programs depends on the number of blocks only, so that a graph whose unused blocks are empty serves
any batch of its size.
"""

import torch
from torch import Tensor

from quire_kernels.lora import BLOCK_ROWS, LayerSlots, TokenGroups
from quire_kernels.lora.device_kernels import expand_kernel, shrink_kernel
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target

_LARGEST_TILE = 64
"""The ranks of one tile of a product."""


def add_adapters(y: Tensor, x: Tensor, layer: LayerSlots, groups: TokenGroups) -> None:
    require_device("add_adapters", y.device)
    blocks, tokens = groups.blocks.shape[0], groups.order.shape[0]
    if not blocks or not tokens:
        return
    slots, rank, outputs = layer.b.shape
    parts, inputs = layer.ends.shape[0], x.shape[1]
    shrink, expand = _launches(inputs, outputs, parts, rank, y.element_size(), target_of(y.device))
    splits = expand.constants["SPLITS"]
    shrunk = torch.empty((tokens, splits, parts, rank), dtype=torch.float32, device=y.device)
    shrink(
        (blocks, splits * parts, cdiv(rank, shrink.constants["BLOCK_R"])),
        x,
        x.stride(0),
        layer.a,
        layer.ranks,
        groups.order,
        groups.blocks,
        shrunk,
        slots,
    )
    expand(
        (blocks, cdiv(outputs, expand.constants["BLOCK_N"])),
        y,
        y.stride(0),
        layer.b,
        layer.ranks,
        layer.ends,
        groups.order,
        groups.blocks,
        shrunk,
    )


@launches
def _launches(
    inputs: int, outputs: int, parts: int, rank: int, element_size: int, target: Target
) -> tuple[Launch, Launch]:
    shrink, expand = (config_for(f"lora.{name}", target, f"bytes={element_size}") for name in ("shrink", "expand"))
    # A product of a GPU has at least 16 ranks.
    rank_tile = min(_LARGEST_TILE, max(16, next_power_of_2(rank)))
    shared = {"P": parts, "R": rank, "BLOCK_M": BLOCK_ROWS, "BLOCK_R": rank_tile}
    splits = cdiv(inputs, shrink.blocks["DEPTH"])
    return (
        Launch(shrink_kernel, K=inputs, **shared, **shrink.options),
        Launch(expand_kernel, N=outputs, SPLITS=splits, **shared, **expand.options),
    )
