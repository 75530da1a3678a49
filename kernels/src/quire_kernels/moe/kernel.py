"""Mixtures of experts in Triton: one launch for routing, five for the experts, without a wait for the device.

The workspace of ``fused_experts`` holds the experts' results before their sum: T K rows of I and T K rows of H in the
dtype of the activations, and a few integers for each assignment. It comes from torch's allocator, which also works
during the capture of CUDA graphs.

Legend: T tokens, H hidden size, I intermediate size, E experts, K experts per token.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.errors import UnsupportedDeviceError
from quire_kernels.moe import Expert, Routes
from quire_kernels.moe.device_kernels import (
    grouped_product_kernel,
    route_kernel,
    sort_kernel,
    sum_kernel,
)
from quire_kernels.triton_runtime.config import config_for
from quire_kernels.triton_runtime.device import require_device, target_of
from quire_kernels.triton_runtime.launch import Launch, cdiv, launches, next_power_of_2
from quire_kernels.triton_runtime.target import Target


def route_tokens(logits: Tensor, per_token: int, normalise: bool) -> Routes:
    require_device("route_tokens", logits.device)
    tokens, experts = logits.shape
    routes = Routes(
        experts=torch.empty((tokens, per_token), dtype=torch.int64, device=logits.device),
        weights=torch.empty((tokens, per_token), dtype=torch.float32, device=logits.device),
    )
    if tokens:
        launch = _route(experts, per_token, normalise, target_of(logits.device))
        launch((tokens,), logits, logits.stride(0), routes.experts, routes.weights)
    return routes


@launches
def _route(experts: int, per_token: int, normalise: bool, target: Target) -> Launch:
    return Launch(
        route_kernel,
        E=experts,
        K=per_token,
        NORMALISE=normalise,
        PADDED_E=next_power_of_2(experts),
        PADDED_K=next_power_of_2(per_token),
        **config_for("moe.route", target).options,
    )


def apply_experts(x: Tensor, routes: Routes, experts: Sequence[Expert]) -> Tensor:
    raise UnsupportedDeviceError(
        f"apply_experts: calls experts one by one, which {x.device.type} would wait for; stack their weights and "
        "use fused_experts"
    )


def fused_experts(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, gelu: bool, deterministic: bool) -> Tensor:
    require_device("fused_experts", x.device)
    tokens, hidden = x.shape
    num_experts, inner = gate_up.shape[0], down.shape[2]
    per_token = routes.experts.shape[1]
    out = torch.empty_like(x)
    if tokens == 0:
        return out
    target = target_of(x.device)
    size = config_key(tokens * per_token, num_experts, x.element_size(), deterministic=deterministic)
    gated, single = config_for("moe.gate_up", target, size), config_for("moe.down", target, size)
    made = torch.empty((tokens * per_token, inner), dtype=x.dtype, device=x.device)
    product = torch.empty((tokens * per_token, hidden), dtype=x.dtype, device=x.device)
    for config, source, weights, result in ((gated, x, gate_up, made), (single, made, down, product)):
        # Both products use the same blocks unless a table says otherwise.
        if config is gated or config.blocks["BLOCK_M"] != gated.blocks["BLOCK_M"]:
            order, blocks, num_blocks = sort_assignments(routes, num_experts, config.blocks["BLOCK_M"], target)
        width = result.shape[1]
        launch = _product((per_token, width, source.shape[1]), config is gated, gelu, size, target)
        grid = (cdiv(width, config.blocks["BLOCK_N"]), blocks.shape[0])
        launch(grid, source, weights, result, order, blocks, num_blocks)
    add = _sum(hidden, per_token, target)
    add((tokens, cdiv(hidden, add.constants["TILE"])), product, routes.weights, out)
    return out


@launches
def _product(shape: tuple[int, int, int], gated: bool, gelu: bool, size: str, target: Target) -> Launch:
    """Return the launch of a product of all experts. ``shape``: experts per token, outputs and inputs."""
    options = config_for("moe.gate_up" if gated else "moe.down", target, size).options
    per_token, width, depth = shape
    return Launch(grouped_product_kernel, K=per_token, WIDTH=width, DEPTH=depth, GATED=gated, GELU=gelu, **options)


@launches
def _sum(hidden: int, per_token: int, target: Target) -> Launch:
    return Launch(sum_kernel, H=hidden, K=per_token, **config_for("moe.sum", target).options)


def sort_assignments(routes: Routes, num_experts: int, rows: int, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Return the order of assignments, their blocks of at most ``rows`` rows, and the number of blocks."""
    assignments, device = routes.experts.numel(), routes.experts.device
    order = torch.empty(assignments, dtype=torch.int32, device=device)
    blocks = torch.empty((most_blocks(assignments, num_experts, rows), 3), dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    sort = _sorting(num_experts, rows, target)
    programs = cdiv(max(assignments, blocks.shape[0]), sort.constants["CHUNK"])
    sort((programs,), routes.experts, order, blocks, num_blocks, assignments)
    return order, blocks, num_blocks


@launches
def _sorting(num_experts: int, rows: int, target: Target) -> Launch:
    options = config_for("moe.sort", target).options
    bins = max(32, next_power_of_2(num_experts))
    return Launch(sort_kernel, E=num_experts, PADDED_E=bins, BLOCK_M=rows, **options)


def config_key(assignments: int, num_experts: int, element_bytes: int, *, deterministic: bool) -> str:
    """Return the key of the best tiles of the products.

    Few tokens per expert need as many programs as possible, which read weights; many need large tiles, because those of
    64 rows read 1 byte for 43 operations. The number is that of the launch, which is known without the device.
    """
    key = f"bytes={element_bytes}"
    if deterministic or element_bytes > 2:
        return key
    per_expert = assignments / num_experts
    return f"{key} few" if per_expert <= _FEW else f"{key} many" if per_expert >= _MANY else key


_FEW, _MANY = 16, 128


def most_blocks(assignments: int, num_experts: int, rows: int) -> int:
    """Return the maximum number of blocks for any routes: each expert leaves at most one block unfilled."""
    return min(assignments, assignments // rows + num_experts)
