"""The paged KV cache of one layer.

The attention implementation of the device determines the memory layout, which is decided here. A float8 cache stores
keys and values divided by a scale per head, and is supported by Triton only.

Legend: N blocks, S block size, HK KV heads, D head dim, DV = D rounded up to whole vectors. slot = block * S + offset.
"""

import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_kernels.checks import STORAGE_DTYPES, refuse
from quire_kernels.dispatch import runs_triton
from quire_kernels.host_memory import lazy_zeros, pinned_zeros

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest float8 number; larger values are stored as this one."""

VECTOR = 16
"""The number of elements in a vector of CPU attention: tokens of a key block, components of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The keys and values of one layer, by block.

    On a CPU a key block is transposed, so that the scores of a block's tokens are one vector operation per component of
    the query: keys [N, HK, D, S], values [N, HK, S, DV]. If the CPU multiplies pairs of bfloat16, the elements of a
    pair are adjacent: keys [N, HK, D / 2 rounded up, S, 2], values [N, HK, S / 2, DV, 2]. For Triton both are [N, HK,
    S, D], so that one head's part of a block is contiguous.
    """

    keys: Tensor
    values: Tensor
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    keys_transposed: bool
    key_scale: Tensor | None
    """[HK] float32 for a float8 cache, else None: stored = key / scale."""
    value_scale: Tensor | None
    in_pairs: bool = False

    @property
    def value_dim(self) -> int:
        """Return DV, or D for Triton."""
        return self.values.shape[3]


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Return a cache of zeros. On a CPU its pages are allocated on the first write.

    block_size  a multiple of 16
    dtype       float32, bfloat16, float16 or, for Triton, float8_e4m3fn with scales that are initially 1

    Raise ArgumentError for another block size or dtype.
    """
    triton = runs_triton(device.type)
    if block_size < 1 or block_size % VECTOR:
        refuse("allocate_kv_cache", "block_size", f"is {block_size}; a multiple of {VECTOR} is needed")
    if dtype not in STORAGE_DTYPES and not (triton and dtype == FP8):
        allowed = "float32, bfloat16, float16" + (" or float8_e4m3fn" if triton else "")
        refuse("allocate_kv_cache", "dtype", f"is {dtype}; {allowed} is needed on {device.type}")
    key_shape: tuple[int, ...] = (num_blocks, kv_heads, block_size, head_dim)
    value_shape = key_shape
    in_pairs = False
    if not triton:
        value_dim = -(-head_dim // VECTOR) * VECTOR
        in_pairs = _in_pairs(dtype)
        if in_pairs:
            key_shape = (num_blocks, kv_heads, -(-head_dim // 2), block_size, 2)
            value_shape = (num_blocks, kv_heads, block_size // 2, value_dim, 2)
        else:
            key_shape = (num_blocks, kv_heads, head_dim, block_size)
            value_shape = (num_blocks, kv_heads, block_size, value_dim)
    zeros = lazy_zeros if device.type == "cpu" else functools.partial(torch.zeros, device=device)
    scales = [torch.ones(kv_heads, device=device) if dtype == FP8 else None for _ in range(2)]
    return KVCache(
        keys=zeros(key_shape, dtype=dtype),
        values=zeros(value_shape, dtype=dtype),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        keys_transposed=not triton,
        key_scale=scales[0],
        value_scale=scales[1],
        in_pairs=in_pairs,
    )


def _in_pairs(dtype: torch.dtype) -> bool:
    if dtype != torch.bfloat16:
        return False
    # The import is local because a machine with a GPU may have no numba.
    from quire_kernels.cpu_runtime.features import multiplies_bfloat16

    return multiplies_bfloat16()


def allocate_swap_space(cache: KVCache, num_blocks: int) -> KVCache:
    """Return ``num_blocks`` blocks in host memory with the layout of ``cache``, pinned if the cache is on a GPU.

    Pinned pages are allocated at once, because the GPU accesses them directly.
    """

    def zeros(like: Tensor) -> Tensor:
        shape = (num_blocks, *like.shape[1:])
        return (pinned_zeros if like.is_cuda else lazy_zeros)(shape, like.dtype)

    return dataclasses.replace(cache, keys=zeros(cache.keys), values=zeros(cache.values), num_blocks=num_blocks)


def read_tokens(cache: KVCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return copies [HK, L, D] of the keys and values of a sequence's first ``length`` tokens; float8 as float32.

    blocks  [ceil(L / S)] integers: the sequence's block table
    """
    count = -(-length // cache.block_size)
    chosen = blocks[:count].long()
    keys, values = _by_token(
        cache, cache.keys.index_select(0, chosen).transpose(0, 1), cache.values.index_select(0, chosen).transpose(0, 1)
    )
    shape = (cache.kv_heads, count * cache.block_size, -1)
    keys = keys.reshape(shape)[:, :length, : cache.head_dim]
    values = values.reshape(shape)[:, :length, : cache.head_dim]
    if cache.key_scale is None or cache.value_scale is None:
        return keys, values
    return keys.float() * cache.key_scale[:, None, None], values.float() * cache.value_scale[:, None, None]


def _by_token(cache: KVCache, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return blocks [.., block] in the cache's layout as keys [.., S, D] and values [.., S, DV]."""
    if cache.in_pairs:  # [.., D / 2, S, 2], [.., S / 2, DV, 2]
        return keys.transpose(-3, -2).flatten(-2), values.transpose(-2, -1).flatten(-3, -2)
    return (keys.transpose(-2, -1) if cache.keys_transposed else keys), values


def write_tokens(cache: KVCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write keys and values [T, HK, D] to their slots with plain torch; ``store_kv`` is the fast implementation."""
    blocks, offsets = slots // cache.block_size, slots % cache.block_size  # [T], [T]
    keys, values = _stored(keys, cache.key_scale), _stored(values, cache.value_scale)
    if cache.in_pairs:
        keys = torch.nn.functional.pad(keys, (0, cache.head_dim % 2))  # An odd head dim leaves half a pair.
        components = torch.arange(keys.shape[2])
        tokens, heads = blocks[:, None, None], torch.arange(cache.kv_heads)[:, None]
        cache.keys[tokens, heads, components // 2, offsets[:, None, None], components % 2] = keys
        components = components[: cache.head_dim]
        cache.values[tokens, heads, offsets[:, None, None] // 2, components, offsets[:, None, None] % 2] = values
        return
    by_token = cache.keys.transpose(2, 3) if cache.keys_transposed else cache.keys  # [N, HK, S, D]
    by_token[blocks, :, offsets] = keys
    cache.values[blocks, :, offsets, : cache.head_dim] = values


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """Return ``x`` [T, HK, D] in the cache's dtype and scale."""
    if scale is None:
        return x
    # The conversion alone would turn values beyond the range into NaN.
    return (x.float() / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8)
