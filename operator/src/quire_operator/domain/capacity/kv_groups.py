"""The sequences that fit into a KV cache if layers may have sliding windows; formulas in ``quire_common.kv_size``."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_common import kv_size
from quire_common.kv_size import CacheGroup, CacheLimits
from quire_operator.domain.capacity.attention_windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with the same window; None is full attention."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The sequences that a KV cache of some size holds."""

    tokens: int
    """The length of one sequence that has the cache to itself."""
    sequences: int
    """The number of sequences of the longest length."""


def group_layers(windows: Windows, bytes_per_token: Sequence[int]) -> tuple[KVGroup, ...]:
    """Return the groups of a model's layers. Both arguments are by layer."""
    layers = list(zip(windows, bytes_per_token, strict=True))
    return tuple(
        KVGroup(bytes_per_token=sum(size for own, size in layers if own == window), window=window)
        for window in dict.fromkeys(windows)
    )


def share_groups(budget_bytes: int, groups: Sequence[KVGroup], limits: CacheLimits) -> Held:
    """Return what fits into a cache of this size."""
    found = cache_groups(groups, limits)
    blocks = kv_size.share_blocks(budget_bytes, kv_size.demands(found, limits, use_all=True))
    full = [count for count, group in zip(blocks, found, strict=True) if group.window is None]
    tokens = min(full or blocks) * limits.block_size
    sequences = limits.max_sequences
    for count, group in zip(blocks, found, strict=True):
        sequences = min(sequences, count // limits.longest_blocks(group))
        if group.window is not None and count < limits.longest_blocks(group):
            # A sequence this short needs no room to move the window, but every layer holds all of it.
            tokens = min(tokens, group.window, min(blocks) * limits.block_size)
    return Held(tokens=tokens, sequences=sequences)


def sequence_bytes(groups: Sequence[KVGroup], limits: CacheLimits) -> int:
    """Return the smallest cache that holds one sequence of the longest length."""
    return kv_size.sequence_bytes(cache_groups(groups, limits), limits)


def most_bytes(groups: Sequence[KVGroup], limits: CacheLimits) -> int:
    """Return the largest cache of which every byte could be used."""
    return kv_size.most_bytes(cache_groups(groups, limits), limits)


def cache_groups(groups: Sequence[KVGroup], limits: CacheLimits) -> list[CacheGroup]:
    """Return the groups in blocks. A window no shorter than the longest sequence counts as full attention."""
    windowed = [group for group in groups if group.window is not None and group.window < limits.sequence_tokens]
    full = sum(group.bytes_per_token for group in groups if group not in windowed)
    found = [CacheGroup(block_bytes=g.bytes_per_token * limits.block_size, window=g.window) for g in windowed]
    return [*found, *([CacheGroup(block_bytes=full * limits.block_size)] if full else [])]
