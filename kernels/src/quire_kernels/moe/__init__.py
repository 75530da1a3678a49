"""Mixtures of experts: the routing of tokens to experts, and the weighted sum of the experts' outputs.

``apply_experts`` calls experts, for example with packed weights on a CPU. ``fused_experts`` uses stacked weights; on a
GPU it never waits for the number of tokens per expert.

Legend: T tokens, H hidden size, I intermediate size, E experts, K experts per token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation

Expert = Callable[[Tensor], Tensor]
"""A function from [N, H] to [N, H] whose rows are independent of one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The experts of each token and their weights."""

    experts: Tensor  # [T, K] int64, the most probable first
    weights: Tensor  # [T, K] float32


def route_tokens(logits: Tensor, per_token: int, *, normalise: bool) -> Routes:
    """Return the ``per_token`` largest of softmax(logits), in float32.

    logits     [T, E], rows at any stride
    normalise  whether each token's weights are scaled to a sum of 1

    Raise ArgumentError on another shape, dtype or number.
    """
    check_storage("route_tokens", "logits", logits)
    if logits.dim() != 2:
        refuse("route_tokens", "logits", f"has shape {tuple(logits.shape)}; [tokens, experts] is needed")
    if not 1 <= per_token <= logits.shape[1]:
        refuse("route_tokens", "per_token", f"is {per_token}; 1 to {logits.shape[1]}, the number of experts, is needed")
    return implementation("moe", logits.device.type).route_tokens(logits, per_token, normalise)


def apply_experts(x: Tensor, routes: Routes, experts: Sequence[Expert]) -> Tensor:
    """Compute y[t] = sum over k of weights[t, k] * experts[experts[t, k]](x[t]), in float32 in the order of k.

    Each expert that has tokens is called once, with the rows of all its tokens.

    x        [T, H], contiguous
    returns  [T, H], new and contiguous, same dtype

    Raise ArgumentError on other shapes, strides or dtypes, or for an unknown expert; UnsupportedDeviceError on a GPU.
    """
    _check_tokens("apply_experts", x, routes)
    return implementation("moe", x.device.type).apply_experts(x, routes, experts)


def fused_experts(
    x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, *, gelu: bool, deterministic: bool = False
) -> Tensor:
    """Compute y[t] = sum over k of weights[t, k] * down[e] (activation(gate[e] x[t]) * (up[e] x[t])).

    e is experts[t, k]. The activation is silu, or gelu with tanh. Products and the sum are in float32, the sum in the
    order of k. The intermediate results of an expert are rounded to the dtype of ``x``.

    x        [T, H], contiguous
    gate_up  [E, 2 I, H], contiguous: for each expert I rows of gate, then I of up
    down     [E, H, I], contiguous
    returns  [T, H], new and contiguous, same dtype

    A token's result does not depend on the other tokens. Without ``deterministic`` its last bits can depend on their
    number, because a GPU chooses tiles by the number of tokens per expert. Raise ArgumentError on other shapes, strides
    or dtypes and, on a CPU, for an unknown expert.
    """
    _check_tokens("fused_experts", x, routes)
    check_device("fused_experts", x, gate_up=gate_up, down=down)
    if gate_up.dim() != 3 or gate_up.shape[1] % 2 or gate_up.shape[0] == 0:
        refuse("fused_experts", "gate_up", f"has shape {tuple(gate_up.shape)}; [experts, 2 I, H] is needed")
    experts, double, hidden = gate_up.shape[0], gate_up.shape[1], x.shape[1]
    check_dense("fused_experts", "gate_up", gate_up, x.dtype, (experts, double, hidden))
    check_dense("fused_experts", "down", down, x.dtype, (experts, hidden, double // 2))
    return implementation("moe", x.device.type).fused_experts(x, routes, gate_up, down, gelu, deterministic)


def _check_tokens(op: str, x: Tensor, routes: Routes) -> None:
    check_storage(op, "x", x)
    if x.dim() != 2 or not x.is_contiguous():
        refuse(op, "x", f"is {tuple(x.shape)} with strides {x.stride()}; a contiguous [tokens, H] is needed")
    if routes.experts.dim() != 2 or routes.experts.shape[1] == 0:
        refuse(op, "experts", f"has shape {tuple(routes.experts.shape)}; [tokens, K >= 1] is needed")
    shape = (x.shape[0], routes.experts.shape[1])
    check_dense(op, "experts", routes.experts, torch.int64, shape)
    check_dense(op, "weights", routes.weights, torch.float32, shape)
    check_device(op, x, experts=routes.experts, weights=routes.weights)
