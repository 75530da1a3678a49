"""packed_linear in plain torch: the reference for every implementation."""

import torch
from torch import Tensor

from quire_kernels.packed_linear import quantise_weight


def int8_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product with a weight [N, K] that is not quantized yet."""
    quantised, scales = quantise_weight(weight)
    levels, zeros, row_scales = quantise_rows(x)
    whole = (levels.double() - zeros[:, None].double()) @ quantised.double().t()  # [T, N]
    product = whole * row_scales[:, None].double() * scales.double()
    return (product if bias is None else product + bias.double()).to(x.dtype)


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return levels q from 0 to 255 [T, K], zero points z [T] and scales s [T]: x is about s (q - z)."""
    low, high = x.float().amin(dim=1).clamp(max=0.0), x.float().amax(dim=1).clamp(min=0.0)
    inverse = torch.where(high > low, 255.0 / (high - low), torch.zeros_like(high))
    zeros = torch.round(-low * inverse)
    levels = (torch.round(x.float() * inverse[:, None]) + zeros[:, None]).clamp(max=255.0)
    return levels.int(), zeros.int(), (high - low) / 255.0


def bfloat16_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    wide = x.double() @ weight.double().t()  # [T, N]
    return (wide if bias is None else wide + bias.double()).to(x.dtype)


def float_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product in float64 with the unpacked weights."""
    wide = x.double() @ weight.double().t()  # [T, N]
    return (wide if bias is None else wide + bias.double()).to(x.dtype)
