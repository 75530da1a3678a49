"""The layout of the KV cache that the core sees, and its memory.

The attention kernel determines the layout within a block, ``cache_size`` the number of blocks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from quire_common.kv_size import CacheGroup, bytes_by_window, kv_bytes_per_token
from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.model.shape import LayerHeads, ModelShape
from quire_engine.runner.cache_size import CacheSize
from quire_kernels import kv_cache as memory
from quire_kernels.dispatch import runs_triton
from quire_kernels.kv_cache import VECTOR, KVCache, allocate_kv_cache

CPU = torch.device("cpu")


def option_problems(options: CacheOptions) -> list[str]:
    if options.block_size % VECTOR:
        return [f"--block-size {options.block_size}: a multiple of {VECTOR} is needed"]
    return []


def cache_groups(
    shape: ModelShape, dtype: torch.dtype, block_size: int, device: torch.device = CPU
) -> tuple[CacheGroup, ...]:
    """Return a group for each window that occurs, and one for full attention."""
    layer_bytes = [_layer_block_bytes(heads, dtype, block_size, device) for heads in shape.layer_heads]
    sums = bytes_by_window(shape.windows, layer_bytes, shape.kv_groups)
    return tuple(CacheGroup(block_bytes=size, window=window) for window, size in sums.items())


def largest_groups(
    stages: Sequence[ModelShape], dtype: torch.dtype, block_size: int, device: torch.device = CPU
) -> tuple[CacheGroup, ...]:
    """Return the groups of a model in stages, with the bytes of a block on the stage where it is the largest.

    All stages have as many blocks, because they share the block tables, but layers of a window may be on few of them.
    """
    by_stage = [cache_groups(stage, dtype, block_size, device) for stage in stages]
    return tuple(
        replace(groups[0], block_bytes=max(group.block_bytes for group in groups))
        for groups in zip(*by_stage, strict=True)
    )


def _layer_block_bytes(heads: LayerHeads, dtype: torch.dtype, block_size: int, device: torch.device) -> int:
    # A CPU's attention stores values in whole vectors.
    value_dim = heads.head_dim if runs_triton(device.type) else -(-heads.head_dim // VECTOR) * VECTOR
    pair = kv_bytes_per_token(layers=1, kv_heads=heads.kv_heads, head_dim=1, dtype_bytes=dtype.itemsize)
    return block_size * pair // 2 * (heads.head_dim + value_dim)


def make_layout(shape: ModelShape, block_size: int, size: CacheSize) -> KVCacheLayout:
    """Return the layout with the groups of ``cache_groups``, in its order."""
    groups = tuple(
        KVCacheGroup(
            layers=tuple(layer for layer, own in enumerate(shape.windows) if own == window),
            num_blocks=num_blocks,
            window=window,
            chunked=shape.chunked and window is not None,
            num_swap_blocks=num_swap_blocks,
        )
        for window, num_blocks, num_swap_blocks in zip(
            shape.kv_groups, size.num_blocks, size.num_swap_blocks, strict=True
        )
    )
    return KVCacheLayout(block_size=block_size, groups=groups)


def allocate(
    layout: KVCacheLayout, shape: ModelShape, dtype: torch.dtype, device: torch.device = CPU
) -> tuple[KVCache, ...]:
    """Return a cache per layer with its group's number of blocks.

    For Triton there is one block more, which no sequence gets: steps padded to a captured graph's size write there.
    """
    blocks = {layer: group.num_blocks for group in layout.groups for layer in group.layers}
    return tuple(
        allocate_kv_cache(
            num_blocks=blocks[layer] + spare_blocks(device),
            block_size=layout.block_size,
            kv_heads=heads.kv_heads,
            head_dim=heads.head_dim,
            dtype=dtype,
            device=device,
        )
        for layer, heads in enumerate(shape.layer_heads)
    )


def spare_blocks(device: torch.device) -> int:
    """Return the number of blocks of each group in addition to those of the layout."""
    return 1 if runs_triton(device.type) else 0


def allocate_swap_space(layout: KVCacheLayout, caches: tuple[KVCache, ...]) -> tuple[KVCache, ...]:
    """Return the caches in host memory with the swap blocks; an empty tuple if there is no swap space."""
    blocks = {layer: group.num_swap_blocks for group in layout.groups for layer in group.layers}
    if not any(blocks.values()):
        return ()
    return tuple(memory.allocate_swap_space(cache, blocks[layer]) for layer, cache in enumerate(caches))
