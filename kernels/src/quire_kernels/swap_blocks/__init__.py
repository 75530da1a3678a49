"""Whole blocks from one set of caches to another: between KV cache and swap space, in one launch for all layers.

Legend: L layers, C blocks to copy, N blocks of a cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, refuse
from quire_kernels.dispatch import implementation
from quire_kernels.kv_cache import KVCache


def swap_blocks(
    sources: Sequence[KVCache], targets: Sequence[KVCache], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    """Copies block ``source_blocks[i]`` of each source to block ``target_blocks[i]`` of the target in its place.

    sources, targets               L caches each, of one shape and dtype but for their number of blocks
    source_blocks, target_blocks   [C] int64; no target block twice

    Raises ArgumentError on other shapes or dtypes, and on a block out of range.
    """
    if not sources or len(sources) != len(targets):
        refuse("swap_blocks", "targets", f"are {len(targets)} caches; as many as sources, {len(sources)}, are needed")
    wanted = _kind(sources[0])
    for argument, caches in (("sources", sources), ("targets", targets)):
        for cache in caches:
            if _kind(cache) != wanted:
                refuse("swap_blocks", argument, f"hold blocks of {_kind(cache)}; {wanted} is needed")
    count = source_blocks.numel()
    check_dense("swap_blocks", "source_blocks", source_blocks, torch.int64, (count,))
    check_dense("swap_blocks", "target_blocks", target_blocks, torch.int64, (count,))
    for argument, blocks, caches in (
        ("source_blocks", source_blocks, sources),
        ("target_blocks", target_blocks, targets),
    ):
        fewest = min(cache.num_blocks for cache in caches)
        if count and not 0 <= int(blocks.min()) <= int(blocks.max()) < fewest:
            refuse("swap_blocks", argument, f"leave a cache of {fewest} blocks")
    if count:
        implementation("swap_blocks", sources[0].keys.device.type).swap_blocks(
            sources, targets, source_blocks, target_blocks
        )


def _kind(cache: KVCache) -> tuple[torch.dtype, int, int, int]:
    """Dtype, KV heads, head dim and block size."""
    return cache.keys.dtype, cache.kv_heads, cache.head_dim, cache.block_size
