"""store_kv in plain torch: the reference for every implementation."""

import torch
from torch import Tensor

from quire_kernels.kv_cache import KVCache, write_tokens
from quire_kernels.rms_norm import reference as rms_norm_reference
from quire_kernels.store_kv import HeadNorm


def store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    cache: KVCache,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
) -> None:
    if q_norm is not None:
        q.copy_(rms_norm_reference.rms_norm(q, q_norm.weight, q_norm.eps))
    keys = k.clone() if k_norm is None else rms_norm_reference.rms_norm(k, k_norm.weight, k_norm.eps)
    _rotate(q, cos_sin, positions)
    _rotate(keys, cos_sin, positions)
    write_tokens(cache, slots, keys, v)


def _rotate(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    half = cos_sin.shape[1] // 2
    angles = cos_sin[positions].unsqueeze(1)  # [T, 1, R]
    cos, sin = angles[..., :half], angles[..., half:]
    first, second = x[..., :half].float(), x[..., half : 2 * half].float()  # [T, H, R/2]
    x[..., : 2 * half] = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
