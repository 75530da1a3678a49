"""One KV cache group as the core sees it: its blocks, and the window of its layers.

It is pure arithmetic over a ``BlockPool``; ``kv_manager`` and ``prefix_cache`` share it.
"""

from dataclasses import dataclass

from quire_engine.core.block_pool import BlockPool


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGroup:
    pool: BlockPool
    block_size: int
    window: int | None

    def first_visible(self, position: int) -> int:
        """Return the first block of which a query at ``position`` sees anything."""
        return 0 if self.window is None else max(0, position + 1 - self.window) // self.block_size

    def largest_chunk(self) -> int:
        """Return the largest chunk that fits together with the window before it, wherever in a block they start."""
        assert self.window is not None
        return (self.pool.num_blocks - 1) * self.block_size + 2 - self.window

    def blocks_at_most(self, num_tokens: int, *, max_chunk: int) -> int:
        """Return the maximum number of blocks that a sequence of that many tokens ever holds."""
        blocks = -(-num_tokens // self.block_size)
        if self.window is None:
            return blocks
        span = self.window - 1 + min(num_tokens, max_chunk)
        return min(blocks, (span + self.block_size - 2) // self.block_size + 1)
