"""The size of the KV cache: bytes per token, and how a budget is shared among groups of layers.

Layers with the same sliding window, or all with full attention, form a group and share one block table. A group with a
window never needs more blocks than the windows of its sequences; what it leaves free goes to the other groups. The
engine allocates by these formulas, and the operator predicts by them what fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers with the same sliding window."""

    block_bytes: int
    """The bytes of one block: keys and values of all layers of the group."""
    window: int | None = None
    """Tokens a query may look back on, itself included; None is full attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """The longest sequence, the number of sequences and the block size that a cache is made for."""

    block_size: int
    sequence_tokens: int
    """Tokens of the longest sequence."""
    max_sequences: int
    max_batched_tokens: int

    @property
    def sequence_blocks(self) -> int:
        """The blocks of the longest sequence in a group with full attention."""
        return -(-self.sequence_tokens // self.block_size)

    def fewest_blocks(self, group: CacheGroup) -> int:
        """Return the blocks with which a sequence runs at all: a whole window, and room to move it by one step."""
        return 1 if group.window is None else -(-group.window // self.block_size) + 2

    def longest_blocks(self, group: CacheGroup) -> int:
        """Return the blocks with which one sequence runs to the longest length."""
        return self.sequence_blocks if group.window is None else self.fewest_blocks(group)

    def most_blocks(self, group: CacheGroup) -> int:
        """Return the blocks that all sequences at full length would use; a group never needs more."""
        most = self.max_sequences * self.sequence_blocks
        if group.window is not None:
            most = min(most, self._most_window_blocks(group.window))
        return max(most, self.fewest_blocks(group))

    def sequences(self, blocks: Sequence[int], groups: Sequence[CacheGroup]) -> int:
        """Return how many sequences of the longest length fit into these blocks of each group at once."""
        fits = [count // self.longest_blocks(group) for count, group in zip(blocks, groups, strict=True)]
        return min(self.max_sequences, *fits)

    def _most_window_blocks(self, window: int) -> int:
        """Return the most blocks of a group with a window.

        Running sequences hold at most their window, which starts and ends within a block, and together the tokens of
        one step. Half as many again keep the windows of finished sequences for prompts with the same prefix.
        """
        held = self.max_sequences * (-(-window // self.block_size) + 2) + -(-self.max_batched_tokens // self.block_size)
        return held + held // 2


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """The share of a budget that one group can use."""

    block_bytes: int
    most_blocks: int | None = None
    """The blocks beyond which memory would be wasted; None is no limit."""


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Return the bytes of one token: a key and a value per layer and KV head."""
    return 2 * layers * kv_heads * head_dim * dtype_bytes


def bytes_by_window(
    windows: Sequence[int | None], layer_bytes: Sequence[int], groups: Sequence[int | None] = ()
) -> dict[int | None, int]:
    """Return the bytes of the layers of each window, in the order of ``groups``, or of the layers if that is empty."""
    sums = dict.fromkeys(groups or windows, 0)
    for size, window in zip(layer_bytes, windows, strict=True):
        sums[window] += size
    return sums


def demands(groups: Sequence[CacheGroup], limits: CacheLimits, *, use_all: bool) -> list[GroupDemand]:
    """Return what each group can use.

    With ``use_all`` the groups with full attention use the whole budget; without such groups, all groups do.
    """
    has_full = any(group.window is None for group in groups)
    return [
        GroupDemand(
            block_bytes=group.block_bytes,
            most_blocks=None if use_all and has_full is (group.window is None) else limits.most_blocks(group),
        )
        for group in groups
    ]


def share_blocks(budget_bytes: int, groups: Sequence[GroupDemand]) -> tuple[int, ...]:
    """Return as many blocks for every group as the bytes allow; what a group cannot use goes to the others."""
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


def sequence_bytes(groups: Sequence[CacheGroup], limits: CacheLimits) -> int:
    """Return the smallest budget from which ``share_blocks`` gives room for one sequence of the longest length."""
    each = max(limits.longest_blocks(group) for group in groups)
    return sum(
        demand.block_bytes * (each if demand.most_blocks is None else min(each, demand.most_blocks))
        for demand in demands(groups, limits, use_all=True)
    )


def most_bytes(groups: Sequence[CacheGroup], limits: CacheLimits) -> int:
    """Return the largest budget of which every byte could be used."""
    return sum(limits.most_blocks(group) * group.block_bytes for group in groups)


def capacity(budget_bytes: int, groups: Sequence[CacheGroup], limits: CacheLimits) -> tuple[int, int]:
    """Return the tokens of one sequence that has a cache of this size to itself, and how many longest sequences fit."""
    blocks = share_blocks(budget_bytes, demands(groups, limits, use_all=True))
    full = [count for count, group in zip(blocks, groups, strict=True) if group.window is None]
    tokens = min(full or blocks) * limits.block_size
    for count, group in zip(blocks, groups, strict=True):
        if group.window is not None and count < limits.longest_blocks(group):
            # A sequence this short needs no room to move the window, but every layer holds all of it.
            tokens = min(tokens, group.window, min(blocks) * limits.block_size)
    return tokens, limits.sequences(blocks, groups)
