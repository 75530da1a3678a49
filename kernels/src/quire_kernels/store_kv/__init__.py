"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache, in one launch.

Legend: T tokens, HQ/HK query/KV heads, D head dim, P positions in the table, R rotated components.
"""

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.kv_cache import KVCache
from quire_kernels.rotary import check_heads, check_tables


def store_kv(
    q: Tensor, k: Tensor, v: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor, cache: KVCache
) -> None:
    """Rotates ``q`` in place (as ``rotary`` does), and writes the rotated ``k`` and ``v`` to their slots.

    q          [T, HQ, D], changed in place; k, v [T, HK, D] (``k`` may be changed as well)
    cos_sin    [P, R] float32, positions [T] int64: as for ``rotary``
    slots      [T] int64: block * block size + offset, each in another slot
    cache      the layer's cache, of the same dtype

    Raises ArgumentError on other shapes, strides, dtypes, or a position or slot out of range.
    """
    tokens, _, dim = _check_projections(q, k, v)
    check_tables("store_kv", cos_sin, positions, q)
    check_dense("store_kv", "slots", slots, torch.int64, (tokens,))
    if (cache.kv_heads, cache.head_dim) != (k.shape[1], dim) or cache.keys.dtype != k.dtype:
        found = f"{cache.keys.dtype}, {cache.kv_heads} heads of {cache.head_dim}"
        refuse("store_kv", "cache", f"holds {found}; k is {k.dtype}, {k.shape[1]} heads of {dim}")
    implementation("store_kv", q.device.type).store_kv(q, k, v, cos_sin, positions, slots, cache)


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
