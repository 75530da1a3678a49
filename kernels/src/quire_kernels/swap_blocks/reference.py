"""swap_blocks in plain torch: the reference for every implementation."""

from collections.abc import Sequence

from torch import Tensor

from quire_kernels.kv_cache import KVCache


def swap_blocks(
    sources: Sequence[KVCache], targets: Sequence[KVCache], source_blocks: Tensor, target_blocks: Tensor
) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.keys[target_blocks] = source.keys[source_blocks]
        target.values[target_blocks] = source.values[source_blocks]
