"""Mixtures of experts: which experts a token goes to, and the weighted sum of what they make of it.

Legend: T tokens, H hidden size, E experts, K experts a token goes to.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_storage, refuse
from quire_kernels.dispatch import implementation

Expert = Callable[[Tensor], Tensor]
"""[N, H] to [N, H], rows independent of one another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """The experts of each token, and what each counts."""

    experts: Tensor  # [T, K] int64, the most probable first
    weights: Tensor  # [T, K] float32


def route_tokens(logits: Tensor, per_token: int, *, normalise: bool) -> Routes:
    """The ``per_token`` largest of softmax(logits), in float32; ``normalise`` makes those sum to 1 for each token.

    logits  [T, E], rows at any stride

    Raises ArgumentError on another shape, dtype or number.
    """
    check_storage("route_tokens", "logits", logits)
    if logits.dim() != 2:
        refuse("route_tokens", "logits", f"has shape {tuple(logits.shape)}; [tokens, experts] is needed")
    if not 1 <= per_token <= logits.shape[1]:
        refuse("route_tokens", "per_token", f"is {per_token}; 1 to {logits.shape[1]}, the number of experts, is needed")
    return implementation("moe", logits.device.type).route_tokens(logits, per_token, normalise)


def apply_experts(x: Tensor, routes: Routes, experts: Sequence[Expert]) -> Tensor:
    """y[t] = sum over k of weights[t, k] * experts[experts[t, k]](x[t]), summed in float32 in the order of k.

    Each expert is called once, with the rows of all its tokens; one without tokens is not called.

    x        [T, H], contiguous
    returns  [T, H], new and contiguous, same dtype

    Raises ArgumentError on other shapes, strides or dtypes, or an expert that there is not.
    """
    check_storage("apply_experts", "x", x)
    if x.dim() != 2 or not x.is_contiguous():
        refuse(
            "apply_experts", "x", f"is {tuple(x.shape)} with strides {x.stride()}; a contiguous [tokens, H] is needed"
        )
    if routes.experts.dim() != 2 or routes.experts.shape[1] == 0:
        refuse("apply_experts", "experts", f"has shape {tuple(routes.experts.shape)}; [tokens, K >= 1] is needed")
    shape = (x.shape[0], routes.experts.shape[1])
    check_dense("apply_experts", "experts", routes.experts, torch.int64, shape)
    check_dense("apply_experts", "weights", routes.weights, torch.float32, shape)
    return implementation("moe", x.device.type).apply_experts(x, routes, experts)
