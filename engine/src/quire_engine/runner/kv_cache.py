"""Where keys and values lie: the layout that the core sees, and the memory behind it.

Where a block's bytes lie is the attention kernel's choice; how many blocks there are, ``cache_size`` says.
"""

import torch

from quire_engine.config import CacheOptions
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout, kv_bytes_per_token
from quire_engine.model.config import ModelConfig
from quire_engine.runner.cache_size import CacheGroup, CacheSize
from quire_kernels.kv_cache import VECTOR, KVCache, allocate_kv_cache


def option_problems(options: CacheOptions) -> list[str]:
    if options.block_size % VECTOR:
        return [f"--block-size {options.block_size}: a multiple of {VECTOR} is needed on a CPU"]
    return []


def cache_groups(config: ModelConfig, dtype: torch.dtype, block_size: int) -> tuple[CacheGroup, ...]:
    """A group for each window that occurs, and one for full attention."""
    layer_bytes = _layer_block_bytes(config, dtype, block_size)
    return tuple(
        CacheGroup(block_bytes=config.windows.count(window) * layer_bytes, window=window) for window in config.kv_groups
    )


def _layer_block_bytes(config: ModelConfig, dtype: torch.dtype, block_size: int) -> int:
    # Values are held in whole vectors.
    value_dim = -(-config.head_dim // VECTOR) * VECTOR
    pair = kv_bytes_per_token(layers=1, kv_heads=config.num_kv_heads, head_dim=1, dtype_bytes=dtype.itemsize)
    return block_size * pair // 2 * (config.head_dim + value_dim)


def make_layout(config: ModelConfig, block_size: int, size: CacheSize) -> KVCacheLayout:
    """The groups of ``cache_groups``, in its order."""
    groups = tuple(
        KVCacheGroup(
            layers=tuple(layer for layer, own in enumerate(config.windows) if own == window),
            num_blocks=num_blocks,
            window=window,
            num_swap_blocks=num_swap_blocks,
        )
        for window, num_blocks, num_swap_blocks in zip(
            config.kv_groups, size.num_blocks, size.num_swap_blocks, strict=True
        )
    )
    return KVCacheLayout(block_size=block_size, groups=groups)


def allocate(layout: KVCacheLayout, config: ModelConfig, dtype: torch.dtype) -> tuple[KVCache, ...]:
    """A cache per layer, of its group's number of blocks."""
    blocks = {layer: group.num_blocks for group in layout.groups for layer in group.layers}
    return _allocate(blocks, layout, config, dtype)


def allocate_swap_space(layout: KVCacheLayout, config: ModelConfig, dtype: torch.dtype) -> tuple[KVCache, ...]:
    """The same in host memory, of the swap blocks; nothing where there are none."""
    blocks = {layer: group.num_swap_blocks for group in layout.groups for layer in group.layers}
    return _allocate(blocks, layout, config, dtype) if any(blocks.values()) else ()


def _allocate(
    blocks: dict[int, int], layout: KVCacheLayout, config: ModelConfig, dtype: torch.dtype
) -> tuple[KVCache, ...]:
    return tuple(
        allocate_kv_cache(
            num_blocks=blocks[layer],
            block_size=layout.block_size,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        for layer in range(config.num_layers)
    )
