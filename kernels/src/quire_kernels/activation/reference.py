"""Gated activations in plain torch: the reference for every implementation."""

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)  # [T, I] each
    return (functional.silu(gate) * up).to(gate_up.dtype)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)  # [T, I] each
    return (functional.gelu(gate, approximate="tanh") * up).to(gate_up.dtype)
