"""The runner's side of preemption by swap: copies of the blocks that a batch names between KV cache and host memory.

The scheduler decides which blocks are copied; both sides have the same layout, so the bytes are copied unchanged.
"""

from collections.abc import Sequence

import torch

from quire_engine.core.batch import Batch, BlockCopies
from quire_engine.core.kv_layout import KVCacheLayout
from quire_kernels.kv_cache import KVCache
from quire_kernels.swap_blocks import swap_blocks


class Swapper:
    """The copies of blocks.

    ``caches`` and ``space`` have an entry per layer; ``space`` is empty without a swap space.
    """

    def __init__(self, layout: KVCacheLayout, caches: Sequence[KVCache], space: Sequence[KVCache]) -> None:
        # A draft model's layers may have other heads than the target's, and one copy is of blocks of one shape.
        self._layers = [layers_by_shape(group.layers, caches) for group in layout.groups]
        self._caches = caches
        self._space = space

    def apply(self, batch: Batch) -> None:
        """Copy out before in: a block of the cache may be swapped out and reused in one step."""
        self._copy(batch.swap_out, self._caches, self._space)
        self._copy(batch.swap_in, self._space, self._caches)

    def _copy(self, copies: tuple[BlockCopies, ...], sources: Sequence[KVCache], targets: Sequence[KVCache]) -> None:
        if not copies:
            return
        for shapes, blocks in zip(self._layers, copies, strict=True):
            for layers in shapes if blocks.sources else ():
                swap_blocks(
                    [sources[layer] for layer in layers],
                    [targets[layer] for layer in layers],
                    torch.tensor(blocks.sources),
                    torch.tensor(blocks.targets),
                )


def layers_by_shape(layers: Sequence[int], caches: Sequence[KVCache]) -> list[list[int]]:
    """Return the layers of a group, those with blocks of the same shape together."""
    found: dict[object, list[int]] = {}
    for layer in layers:
        found.setdefault((caches[layer].keys.shape, caches[layer].values.shape), []).append(layer)
    return list(found.values())
