"""The blocks of one KV cache group: who holds them, and in which order the free ones are given out.

Every operation costs O(1) a block. Free blocks form a doubly linked list inside two integer columns, so that a block
found again by its prefix leaves the middle of the list without a search. A free block keeps its digest until it is
given out: it is *cached*. Blank blocks are at the front of the list, cached ones behind, least recently used first.
"""

from collections.abc import Iterable, Mapping


class BlockPool:
    """free + referenced = num_blocks; ``num_cached`` of the free ones still hold a prefix that may be found."""

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
        """The ``count`` blocks least worth keeping; the caller has looked at ``num_free``."""
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
        """Give back one reference to each block of a chain, in the order of the chain.

        The tail is put on the list first, so that of blocks released together it is evicted before what it builds on.
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
        """Take one more reference to blocks that were found, off the free list where they are on it."""
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
        """Let a full block be found. Of two blocks with one content the first stays the one that is found."""
        assert self._references[block] > 0
        if self._digests[block] is None and digest not in self._by_digest:
            self._digests[block] = digest
            self._by_digest[digest] = block

    def find(self, digest: bytes) -> int | None:
        return self._by_digest.get(digest)

    def find_published(self, digest: bytes) -> int:
        """As ``find``, of one that is known to be there."""
        return self._by_digest[digest]

    def forget(self) -> None:
        """Nothing published so far can be found any more; running sequences keep their blocks."""
        self._by_digest.clear()
        self._digests = [None] * self.num_blocks
        self.num_cached = 0

    def check_integrity(self, holders: Mapping[int, int]) -> None:
        """Compare with the references that the sequences say they hold: block -> how many."""
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
