"""How the KV cache is divided among a model's layers: those with full attention, and those with a sliding window.

Layers with the same window share their blocks' numbering, so they are one group. A group with a window never needs more
than its sequences' windows; what it leaves goes to the others. The engine's ``core/kv_layout`` and
``runner/cache_size`` have the same arithmetic; tests/contract holds the two equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_operator.domain.capacity.attention_windows import Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the spec asks of the cache: how long, how many, in which blocks."""

    sequence_tokens: int
    """Tokens of the longest sequence."""
    max_sequences: int
    max_batched_tokens: int
    block_size: int

    @property
    def sequence_blocks(self) -> int:
        """Of the longest sequence, where all of it is held."""
        return -(-self.sequence_tokens // self.block_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    """Layers with the same window; None is full attention."""

    bytes_per_token: int
    window: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What a KV cache of some size holds."""

    tokens: int
    """Of one sequence, if it had the cache to itself."""
    sequences: int
    """Of the longest length at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    block_bytes: int
    most_blocks: int | None = None
    """More of them could not be used; None is no limit."""


def group_layers(windows: Windows, *, layer_bytes_per_token: int) -> tuple[KVGroup, ...]:
    return tuple(
        KVGroup(bytes_per_token=windows.count(window) * layer_bytes_per_token, window=window)
        for window in dict.fromkeys(windows)
    )


def most_window_blocks(*, window: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Blocks of which a group with a sliding window makes use."""
    held = max_num_seqs * (-(-window // block_size) + 2) + -(-max_num_batched_tokens // block_size)
    return held + held // 2


def share_blocks(budget_bytes: int, groups: Sequence[GroupDemand]) -> tuple[int, ...]:
    """As many blocks for every group as the bytes allow, but none more than it can use."""
    left, blocks = budget_bytes, [0] * len(groups)
    order = sorted(range(len(groups)), key=lambda i: (groups[i].most_blocks is None, groups[i].most_blocks or 0))
    for place, index in enumerate(order):
        each = left // sum(groups[other].block_bytes for other in order[place:])
        most = groups[index].most_blocks
        if most is None or each < most:
            for other in order[place:]:
                blocks[other] = each
            break
        blocks[index] = most
        left -= most * groups[index].block_bytes
    return tuple(blocks)


def share_groups(budget_bytes: int, groups: Sequence[KVGroup], asked: Limits) -> Held:
    """What fits into a cache of that size."""
    groups = _without_idle_windows(groups, asked)
    blocks = share_blocks(budget_bytes, _demands(groups, asked))
    full = [count for count, group in zip(blocks, groups, strict=True) if group.window is None]
    tokens = min(full or blocks) * asked.block_size
    sequences = asked.max_sequences
    for count, group in zip(blocks, groups, strict=True):
        sequences = min(sequences, count // _longest_blocks(group, asked))
        if group.window is not None and count < _longest_blocks(group, asked):
            # So short a sequence needs no room to move the window in, but every layer holds all of it.
            tokens = min(tokens, group.window, min(blocks) * asked.block_size)
    return Held(tokens=tokens, sequences=sequences)


def sequence_bytes(groups: Sequence[KVGroup], asked: Limits) -> int:
    """The smallest cache that holds one sequence of the longest length."""
    groups = _without_idle_windows(groups, asked)
    each = max(_longest_blocks(group, asked) for group in groups)
    return sum(
        demand.block_bytes * (each if demand.most_blocks is None else min(each, demand.most_blocks))
        for demand in _demands(groups, asked)
    )


def most_bytes(groups: Sequence[KVGroup], asked: Limits) -> int:
    """The largest cache of which something could be used."""
    groups = _without_idle_windows(groups, asked)
    return sum(_most_blocks(group, asked) * group.bytes_per_token * asked.block_size for group in groups)


def _without_idle_windows(groups: Sequence[KVGroup], asked: Limits) -> list[KVGroup]:
    """A window no shorter than the longest sequence hides nothing: its layers are as those with full attention."""
    windowed = [group for group in groups if group.window is not None and group.window < asked.sequence_tokens]
    full = sum(group.bytes_per_token for group in groups if group not in windowed)
    return [*windowed, *([KVGroup(bytes_per_token=full)] if full else [])]


def _demands(groups: Sequence[KVGroup], asked: Limits) -> list[GroupDemand]:
    """All of the memory is used up by the groups that can: those with full attention, where there are any."""
    has_full = any(group.window is None for group in groups)
    return [
        GroupDemand(
            block_bytes=group.bytes_per_token * asked.block_size,
            most_blocks=None if has_full is (group.window is None) else _most_blocks(group, asked),
        )
        for group in groups
    ]


def _longest_blocks(group: KVGroup, asked: Limits) -> int:
    """With which one sequence runs to the longest length."""
    return asked.sequence_blocks if group.window is None else -(-group.window // asked.block_size) + 2


def _most_blocks(group: KVGroup, asked: Limits) -> int:
    most = asked.max_sequences * asked.sequence_blocks
    if group.window is not None:
        windows = most_window_blocks(
            window=group.window,
            block_size=asked.block_size,
            max_num_seqs=asked.max_sequences,
            max_num_batched_tokens=asked.max_batched_tokens,
        )
        most = min(most, windows)
    return max(most, 1 if group.window is None else _longest_blocks(group, asked))
