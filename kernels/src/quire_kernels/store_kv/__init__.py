"""The write of keys and values into the paged cache, fused with the rotary embedding of queries and keys.

One launch also applies a norm to each head before the rotation, if the model has one.

Legend: T tokens, HQ/HK query/KV heads, D head dim, P positions in the table, R rotated components.
"""

from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.kv_cache import FP8, KVCache
from quire_kernels.rotary import check_heads, check_tables


class HeadNorm(Protocol):
    """The weights of a root-mean-square norm per head, computed like ``rms_norm`` (Qwen3, Gemma 3)."""

    @property
    def weight(self) -> Tensor:
        """The weight [D], contiguous, dtype of the heads."""
        ...

    @property
    def eps(self) -> float: ...


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
    """Normalize and rotate ``q`` in place, and write ``k``, processed likewise, and ``v`` to their slots.

    q          [T, HQ, D], changed in place; k, v [T, HK, D] (``k`` may be changed as well)
    cos_sin    [P, R] float32, positions [T] int64: as for ``rotary``
    slots      [T] int64: block * block size + offset, all different
    cache      the layer's cache, of the same dtype or of float8

    Raise ArgumentError on other shapes, strides, dtypes, devices, or a position or slot out of range (on a GPU: in the
    debug build, ``triton_runtime.debug``).
    """
    tokens, _, dim = _check_projections(q, k, v)
    check_tables("store_kv", cos_sin, positions, q)
    check_dense("store_kv", "slots", slots, torch.int64, (tokens,))
    if (cache.kv_heads, cache.head_dim) != (k.shape[1], dim) or cache.keys.dtype not in (k.dtype, FP8):
        found = f"{cache.keys.dtype}, {cache.kv_heads} heads of {cache.head_dim}"
        refuse("store_kv", "cache", f"holds {found}; k is {k.dtype}, {k.shape[1]} heads of {dim}")
    for argument, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            check_dense("store_kv", argument, norm.weight, q.dtype, (dim,))
            check_device("store_kv", q, **{argument: norm.weight})
    check_device("store_kv", q, k=k, v=v, cos_sin=cos_sin, positions=positions, slots=slots, cache=cache.keys)
    implementation("store_kv", q.device.type).store_kv(q, k, v, cos_sin, positions, slots, cache, q_norm, k_norm)


def _check_projections(q: Tensor, k: Tensor, v: Tensor) -> torch.Size:
    check_heads("store_kv", "q", q)
    check_heads("store_kv", "k", k)
    check_heads("store_kv", "v", v)
    if k.shape != v.shape:
        refuse("store_kv", "v", f"has shape {tuple(v.shape)}; that of k, {tuple(k.shape)}, is needed")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        refuse("store_kv", "k", f"has shape {tuple(k.shape)}; tokens and head dim of q, {tuple(q.shape)}, are needed")
    if not q.dtype == k.dtype == v.dtype:
        refuse("store_kv", "k, v", f"are {k.dtype}, {v.dtype}; the dtype of q, {q.dtype}, is needed")
    return q.shape
