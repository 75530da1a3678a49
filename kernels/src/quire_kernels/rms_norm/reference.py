"""rms_norm in plain torch: the reference for every implementation."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    if residual is not None:
        residual += x
        x = residual
    wide = x.float()  # [T, H]
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)  # [T, 1]
    return (wide * scale * weight.float()).to(x.dtype)
