"""The write of keys and values into the paged cache, fused with the rotary embedding of queries and keys.

One launch also applies a norm to each head before the rotation, if the model has one.

Legend: T tokens, HQ/HK query/KV heads, D head dim, P positions in the table, R rotated components.
"""

from typing import Protocol

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, check_storage, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.kv_cache import FP8, KVCache


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

    The rotation (RoFormer, arXiv 2104.09864) pairs component i with i + R/2, as in the Llama checkpoints of Hugging
    Face: (x[i], x[i + R/2]) becomes (x[i] cos - x[i + R/2] sin, x[i + R/2] cos + x[i] sin).

    q          [T, HQ, D], changed in place; k, v [T, HK, D] (``k`` may be changed as well)
    cos_sin    [P, R] float32: R/2 cosines, then R/2 sines, of each position
    positions  [T] int64, each below P
    slots      [T] int64: block * block size + offset, all different
    cache      the layer's cache, of the same dtype or of float8

    Raise ArgumentError on other shapes, strides, dtypes, devices, or a position or slot out of range (on a GPU: in the
    debug build, ``triton_runtime.debug``).
    """
    tokens, _, dim = _check_projections(q, k, v)
    _check_table(cos_sin, positions, q)
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


def rotary_table(inverse_frequencies: Tensor, positions: int, attention_factor: float = 1.0) -> Tensor:
    """Return the [P, R] table of cosines and sines of ``store_kv``, from R/2 inverse frequencies.

    Angles are computed in float64: float32 positions times float32 frequencies lose digits in long contexts.
    """
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse_frequencies.double())  # [P, R/2]
    return (torch.cat((angles.cos(), angles.sin()), dim=1) * attention_factor).float()


def _check_projections(q: Tensor, k: Tensor, v: Tensor) -> torch.Size:
    _check_heads("q", q)
    _check_heads("k", k)
    _check_heads("v", v)
    if k.shape != v.shape:
        refuse("store_kv", "v", f"has shape {tuple(v.shape)}; that of k, {tuple(k.shape)}, is needed")
    if q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        refuse("store_kv", "k", f"has shape {tuple(k.shape)}; tokens and head dim of q, {tuple(q.shape)}, are needed")
    if not q.dtype == k.dtype == v.dtype:
        refuse("store_kv", "k, v", f"are {k.dtype}, {v.dtype}; the dtype of q, {q.dtype}, is needed")
    return q.shape


def _check_heads(argument: str, x: Tensor) -> None:
    check_storage("store_kv", argument, x)
    if x.dim() != 3:
        refuse("store_kv", argument, f"has shape {tuple(x.shape)}; [tokens, heads, head dim] is needed")
    if x.stride(1) != x.shape[2] and x.shape[1] != 1:
        refuse("store_kv", argument, f"has strides {tuple(x.stride())}; the heads of a token must lie side by side")


def _check_table(cos_sin: Tensor, positions: Tensor, x: Tensor) -> None:
    width = cos_sin.shape[-1]
    check_dense("store_kv", "cos_sin", cos_sin, torch.float32, (cos_sin.shape[0], width))
    if width % 2 or width > x.shape[2]:
        refuse("store_kv", "cos_sin", f"is {width} wide; an even number up to the head dim {x.shape[2]} is needed")
    check_dense("store_kv", "positions", positions, torch.int64, (x.shape[0],))
