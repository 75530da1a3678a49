"""The paged KV cache of one layer: where its bytes lie is the attention implementation's choice, made here per device.

Legend: N blocks, S block size, HK KV heads, D head dim, DV = D rounded up to whole vectors. slot = block * S + offset.
"""

import contextlib
import functools
import mmap
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from quire_kernels.checks import refuse
from quire_kernels.dispatch import runs_triton

VECTOR = 16
"""Elements that the CPU's attention takes at once: tokens of a key block, components of a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of one layer, by block.

    On a CPU a key block is held transposed, so that the scores of a block's tokens are one vector operation per
    component of the query: keys [N, HK, D, S], values [N, HK, S, DV]. For Triton both are [N, HK, S, D]: what one head
    reads of a block is one stretch of memory.
    """

    keys: Tensor
    values: Tensor
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int
    keys_transposed: bool


def allocate_kv_cache(
    *, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """A cache of zeros. On a CPU the pages come from the kernel as they are first written, not now.

    block_size  a multiple of 16
    """
    if block_size < 1 or block_size % VECTOR:
        refuse("allocate_kv_cache", "block_size", f"is {block_size}; a multiple of {VECTOR} is needed")
    if transposed := not runs_triton(device.type):
        key_shape = (num_blocks, kv_heads, head_dim, block_size)
        value_shape = (num_blocks, kv_heads, block_size, -(-head_dim // VECTOR) * VECTOR)
    else:
        key_shape = value_shape = (num_blocks, kv_heads, block_size, head_dim)
    zeros = _lazy_zeros if device.type == "cpu" else functools.partial(torch.zeros, device=device)
    return KVCache(
        keys=zeros(key_shape, dtype=dtype),
        values=zeros(value_shape, dtype=dtype),
        num_blocks=num_blocks,
        block_size=block_size,
        kv_heads=kv_heads,
        head_dim=head_dim,
        keys_transposed=transposed,
    )


def read_tokens(cache: KVCache, blocks: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence's first ``length`` tokens, in order: two new [HK, L, D].

    blocks  [ceil(L / S)] integers: the sequence's block table
    """
    count = -(-length // cache.block_size)
    chosen = blocks[:count].long()
    keys = cache.keys.index_select(0, chosen).transpose(0, 1)  # [HK, M, S, D], or [HK, M, D, S]
    if cache.keys_transposed:
        keys = keys.transpose(2, 3)
    values = cache.values.index_select(0, chosen).transpose(0, 1)  # [HK, M, S, D]
    shape = (cache.kv_heads, count * cache.block_size, -1)
    return keys.reshape(shape)[:, :length], values.reshape(shape)[:, :length, : cache.head_dim]


def write_tokens(cache: KVCache, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Plain torch write of [T, HK, D] keys and values to their slots; ``store_kv`` is the fast one."""
    blocks, offsets = slots // cache.block_size, slots % cache.block_size  # [T], [T]
    by_token = cache.keys.transpose(2, 3) if cache.keys_transposed else cache.keys  # [N, HK, S, D]
    by_token[blocks, :, offsets] = keys
    cache.values[blocks, :, offsets, : cache.head_dim] = values


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # torch.zeros would write every page. Huge pages, where there are any: blocks lie scattered, and with small pages
    # each of them costs a walk through the page tables.
    size = prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
