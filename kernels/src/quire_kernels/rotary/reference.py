"""rotary in plain torch: the reference for every implementation."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions].unsqueeze(1)  # [T, 1, R]
    cos, sin = angles[..., :half], angles[..., half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()  # [T, H, R/2]
    x[..., : 2 * half] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
