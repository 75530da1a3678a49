"""How the KV cache is cut into blocks: learnt at start-up, read by the scheduler and by the runner.

The core sees block ids only; the strides of the memory behind them belong to the attention backend.
"""

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
