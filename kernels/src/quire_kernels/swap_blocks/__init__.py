"""Copies of whole blocks between the KV cache and the swap space, in one launch for all layers.

Legend: L layers, C blocks to copy, N blocks of a cache.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.checks import check_dense, check_device, refuse
from quire_kernels.dispatch import implementation, runs_triton
from quire_kernels.kv_cache import KVCache


def swap_blocks(
    sources: Sequence[KVCache], targets: Sequence[KVCache], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    """Copy block ``source_blocks[i]`` of each source to block ``target_blocks[i]`` of the corresponding target.

    sources, targets               L caches each, of one shape and dtype except for their number of blocks; on a GPU,
                                   one side may be pinned host memory from ``allocate_swap_space``
    source_blocks, target_blocks   [C] int64, on the device that copies; all target blocks are different

    On a GPU the copies are queued on the current stream, and the host does not wait. It may read or reuse pinned blocks
    after that stream has reached this point.

    Raise ArgumentError on other shapes, dtypes or devices, and on a block out of range (on a GPU: in the debug build,
    ``triton_runtime.debug``).
    """
    if not sources or len(sources) != len(targets):
        refuse("swap_blocks", "targets", f"are {len(targets)} caches; as many as sources, {len(sources)}, are needed")
    device = source_blocks.device
    wanted = _kind(sources[0])
    for argument, caches in (("sources", sources), ("targets", targets)):
        place = caches[0].keys.device
        for cache in caches:
            if _kind(cache) != wanted:
                refuse("swap_blocks", argument, f"hold blocks of {_kind(cache)}; {wanted} is needed")
            if cache.keys.device != place:
                refuse("swap_blocks", argument, f"are on {place} and {cache.keys.device}; one device is needed")
        if place != device and not (device.type == "cuda" and caches[0].keys.is_pinned()):
            allowed = f"{device}, where source_blocks is{', or pinned host memory' if device.type == 'cuda' else ''}"
            refuse("swap_blocks", argument, f"are on {place}; {allowed} is needed")
    count = source_blocks.numel()
    check_dense("swap_blocks", "source_blocks", source_blocks, torch.int64, (count,))
    check_dense("swap_blocks", "target_blocks", target_blocks, torch.int64, (count,))
    check_device("swap_blocks", source_blocks, target_blocks=target_blocks)
    if not count:
        return
    if not runs_triton(device.type):
        _check_range("source_blocks", source_blocks, sources)
        _check_range("target_blocks", target_blocks, targets)
    implementation("swap_blocks", device.type).swap_blocks(sources, targets, source_blocks, target_blocks)


def _check_range(argument: str, blocks: Tensor, caches: Sequence[KVCache]) -> None:
    fewest = min(cache.num_blocks for cache in caches)
    if not 0 <= int(blocks.min()) <= int(blocks.max()) < fewest:
        refuse("swap_blocks", argument, f"leave a cache of {fewest} blocks")


def _kind(cache: KVCache) -> tuple[torch.dtype, int, int, int]:
    """Return dtype, KV heads, head dim and block size."""
    return cache.keys.dtype, cache.kv_heads, cache.head_dim, cache.block_size
