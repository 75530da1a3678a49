"""store_kv in plain torch: the reference for every implementation."""

from torch import Tensor

from quire_kernels.kv_cache import KVCache, write_tokens
from quire_kernels.rms_norm import reference as rms_norm_reference
from quire_kernels.rotary import reference as rotary_reference
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
    rotary_reference.rotary(q, cos_sin, positions)
    rotary_reference.rotary(keys, cos_sin, positions)
    write_tokens(cache, slots, keys, v)
