"""The blocks of one KV cache group: their references, and the order in which free blocks are allocated.

Every operation costs O(1) per block. Free blocks form a doubly linked list in two integer columns, so that a block that
is found again by its prefix leaves the middle of the list without a search. A free block keeps its digest until it is
allocated: it is *cached*. Blank blocks are at the front of the list, cached ones behind, least recently used first.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class BlockPool:
    """A pool of blocks: free + referenced = num_blocks; ``num_cached`` free blocks still hold a prefix."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_cached = 0
        self._references = [0] * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        self._by_digest: dict[bytes, int] = {}
        # A ring: place num_blocks is its anchor, before the first free block and after the last.
        self._anchor = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate the ``count`` least valuable free blocks; the caller has checked ``num_free``."""
        assert 0 <= count <= self.num_free
        following, references, digests = self._next, self._references, self._digests
        blocks = []
        block = following[self._anchor]
        for _ in range(count):
            blocks.append(block)
            references[block] = 1
            digest = digests[block]
            if digest is not None:
                del self._by_digest[digest]
                digests[block] = None
                self.num_cached -= 1
            block = following[block]
        following[self._anchor] = block
        self._previous[block] = self._anchor
        self.num_free -= count
        return blocks

    def release(self, blocks: list[int]) -> None:
        """Return one reference to each block of a chain, in the order of the chain.

        The tail is put on the list first, so that of blocks released together it is evicted before the blocks it builds
        on.
        """
        references = self._references
        for block in reversed(blocks):
            assert references[block] > 0, f"block {block} was released more often than taken"
            references[block] -= 1
            if references[block] == 0:
                self._put_back(block)

    def _put_back(self, block: int) -> None:
        following, previous, anchor = self._next, self._previous, self._anchor
        if self._digests[block] is None:
            before, after = anchor, following[anchor]
        else:
            before, after = previous[anchor], anchor
            self.num_cached += 1
        following[before] = previous[after] = block
        previous[block], following[block] = before, after
        self.num_free += 1

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that were found, and remove them from the free list."""
        for block in blocks:
            if self._references[block] == 0:
                before, after = self._previous[block], self._next[block]
                self._next[before], self._previous[after] = after, before
                self.num_free -= 1
                self.num_cached -= 1
            self._references[block] += 1

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def publish(self, block: int, digest: bytes) -> None:
        """Make a full block findable. Of two blocks with equal content, the first remains the one that is found."""
        assert self._references[block] > 0
        if self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def find(self, digest: bytes) -> int | None:
        return self._by_digest.get(digest)

    def forget(self) -> None:
        """Make all published blocks unfindable; running sequences keep their blocks."""
        self._by_digest.clear()
        self._digests = [None] * self.num_blocks
        self.num_cached = 0

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Raise AssertionError unless the references match those of the sequences (block -> count)."""
        for block, count in enumerate(self._references):
            assert count == holders.get(block, 0), f"block {block}: {count} references, {holders.get(block, 0)} holders"
        free = []
        before, block = self._anchor, self._next[self._anchor]
        while block != self._anchor:
            assert self._previous[block] == before, f"free list is torn before block {block}"
            assert self._references[block] == 0, f"block {block} is free and referenced"
            free.append(block)
            before, block = block, self._next[block]
            assert len(free) <= self.num_blocks, "free list runs in a circle"
        assert len(free) == self.num_free == self._references.count(0)
        assert self.num_cached == sum(self._digests[block] is not None for block in free)
        published = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert published == self._by_digest


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
