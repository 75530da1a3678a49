"""How the KV cache is cut into blocks: learnt at start-up, read by the scheduler and by the runner.

The core sees block ids only; the strides of the memory behind them belong to the attention backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table: all with full attention, or all with the same sliding window."""

    layers: tuple[int, ...]
    num_blocks: int
    window: int | None = None
    """Tokens a query may look back on, itself included; None is full attention."""
    num_swap_blocks: int = 0
    """Blocks of host memory that preempted sequences may be copied to; 0 is no swap space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """Blocks of ``block_size`` tokens. slot = block * block_size + offset."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def max_tokens(self) -> int | None:
        """The longest sequence that fits when it has the whole cache to itself; None where every group is windowed."""
        full = [group.num_blocks for group in self.groups if group.window is None]
        return min(full) * self.block_size if full else None


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes one token takes in the cache: a key and a value per layer and KV head.

    The operator has the same formula in ``domain/capacity``; tests/contract holds the two equal.
    """
    return 2 * layers * kv_heads * head_dim * dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDemand:
    """What one KV cache group makes of memory."""

    block_bytes: int
    """Of one block: keys and values of all layers of the group."""
    most_blocks: int | None = None
    """More of them could not be used; None is no limit."""


def most_window_blocks(*, window: int, block_size: int, max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Blocks of which a group with a sliding window makes use.

    Running sequences hold at most their window each, which begins and ends within a block, and together the tokens of
    one step. Half as many again keep windows of finished ones for prompts that begin alike.
    """
    held = max_num_seqs * (-(-window // block_size) + 2) + -(-max_num_batched_tokens // block_size)
    return held + held // 2


def share_blocks(budget_bytes: int, groups: Sequence[GroupDemand]) -> tuple[int, ...]:
    """As many blocks for every group as the bytes allow, but none more than it can use: what such a group leaves goes
    to the others. The operator has the same formula in ``domain/capacity``; tests/contract holds the two equal."""
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
