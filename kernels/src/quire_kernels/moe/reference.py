"""Mixtures of experts in plain torch, one token at a time: the reference for every implementation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from quire_kernels.moe import Expert, Routes


def route_tokens(logits: Tensor, per_token: int, normalise: bool) -> Routes:
    probabilities = logits.float().softmax(dim=-1)  # [T, E]
    weights, experts = probabilities.topk(per_token, dim=-1)  # [T, K] each
    return Routes(experts=experts, weights=weights / weights.sum(dim=-1, keepdim=True) if normalise else weights)


def apply_experts(x: Tensor, routes: Routes, experts: Sequence[Expert]) -> Tensor:
    y = torch.zeros(x.shape, device=x.device)
    for token, (chosen, weights) in enumerate(zip(routes.experts.tolist(), routes.weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            y[token] += weight * experts[expert](x[token : token + 1])[0].float()
    return y.to(x.dtype)


def fused_experts(x: Tensor, routes: Routes, gate_up: Tensor, down: Tensor, gelu: bool) -> Tensor:
    y = torch.zeros(x.shape, device=x.device)
    for token, (chosen, weights) in enumerate(zip(routes.experts.tolist(), routes.weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            gate, up = (gate_up[expert].float() @ x[token].float()).chunk(2)
            gate = functional.gelu(gate, approximate="tanh") if gelu else functional.silu(gate)
            y[token] += weight * (down[expert].float() @ (gate * up))
    return y.to(x.dtype)
