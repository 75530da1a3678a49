"""The layout of the KV cache in blocks, determined at start-up and read by the scheduler and the runner.

The core sees block ids only; the strides of the memory behind them belong to the attention backend.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroup:
    """Layers that share one block table: all with full attention, or all with the same sliding window."""

    layers: tuple[int, ...]
    num_blocks: int
    window: int | None = None
    """The number of tokens that a query sees, including itself; None means full attention."""
    chunked: bool = False
    """True if a query sees only the tokens of its own chunk of ``window`` positions."""
    num_swap_blocks: int = 0
    """The blocks of host memory for preempted sequences; 0 means no swap space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """The blocks of ``block_size`` tokens in each group. slot = block * block_size + offset."""

    block_size: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def max_tokens(self) -> int | None:
        """The length of the longest sequence that fits alone; None if every group is windowed."""
        full = [group.num_blocks for group in self.groups if group.window is None]
        return min(full) * self.block_size if full else None
