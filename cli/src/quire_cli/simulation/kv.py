"""One engine's KV cache, counted in blocks: those of sequences, and those that the prefix cache keeps.

Under ``engine``. Prefix blocks have the size that the trace uses, which is a number of the engine's blocks (rounded up
or down). Prefix blocks that no sequence uses are evicted on demand, the least recently used first.
"""

from collections import OrderedDict

from quire_cli.simulation.sequence import Sequence


class KVCache:
    def __init__(self, *, num_blocks: int, block_size: int, prefix_block_tokens: int, prefix_caching: bool) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.used = 0
        """Blocks that a sequence holds; the others are free, cached or not."""
        self._prefix_tokens = prefix_block_tokens
        self._prefix_caching = prefix_caching
        self._held: dict[int, int] = {}
        """The number of sequences that use a prefix block."""
        self._cached: OrderedDict[int, int] = OrderedDict()
        """The sizes of unused prefix blocks, the least recently used first."""
        self._num_cached = 0

    @property
    def free(self) -> int:
        return self.num_blocks - self.used

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def hit(self, sequence: Sequence) -> int:
        """Return the number of its leading prefix blocks that are cached."""
        count = 0
        if self._prefix_caching:
            for block in sequence.prefix[: sequence.num_prefix]:
                if block not in self._held and block not in self._cached:
                    break
                count += 1
        return count

    def prefix_tokens(self, count: int) -> int:
        """Tokens of the engine's whole blocks within so many prefix blocks."""
        return self._whole(count) * self.block_size

    def missing(self, sequence: Sequence, hit: int) -> int:
        """Free blocks that it takes to hold all that is known of a sequence that holds nothing yet."""
        held = sum(self._size(place) for place in range(hit) if sequence.prefix[place] in self._held)
        return self.blocks(sequence.known) - held

    def lacking(self, sequence: Sequence, end: int) -> int:
        """Free blocks that it takes to make a sequence's blocks reach ``end`` tokens."""
        return self.blocks(end) - self._whole(sequence.shared) - sequence.private_blocks

    def enter(self, sequence: Sequence, hit: int) -> None:
        """Let it hold what was found of its prefix."""
        for place in range(hit):
            block = sequence.prefix[place]
            size = self._cached.pop(block, None)
            if size is not None:
                self._num_cached -= size
                self.used += size
            self._held[block] = self._held.get(block, 0) + 1
        sequence.shared = hit
        sequence.computed = self.prefix_tokens(hit)

    def grow(self, sequence: Sequence, end: int) -> None:
        """Make its blocks reach ``end`` tokens."""
        count = self.lacking(sequence, end)
        sequence.private_blocks += count
        self.take(count)

    def take(self, count: int) -> None:
        """Use ``count`` more blocks."""
        self.used += count
        assert self.used <= self.num_blocks, "more KV blocks than there are"
        while self._num_cached > self.num_blocks - self.used:
            _, size = self._cached.popitem(last=False)
            self._num_cached -= size

    def publish(self, sequence: Sequence, end: int) -> None:
        """Publish the blocks of its prompt up to ``end``, which the next step computes before others read them.

        If another sequence published a block first, this block and the following ones stay private.
        """
        prefix, place = sequence.prefix, sequence.shared
        if not self._prefix_caching or place == len(prefix):
            return
        while place < len(prefix) and (place + 1) * self._prefix_tokens <= end:
            block = prefix[place]
            if block in self._held or block in self._cached:
                break
            self._held[block] = 1
            sequence.private_blocks -= self._size(place)
            place += 1
        sequence.shared = place

    def settle(self, sequence: Sequence) -> None:
        """Record the blocks that a sequence used while decoding, which are already counted."""
        sequence.private_blocks = self.blocks(sequence.computed) - self._whole(sequence.shared)

    def release(self, sequence: Sequence) -> None:
        """Release a sequence. The end of its prefix is evicted first, because fewer sequences share it."""
        for place in reversed(range(sequence.shared)):
            block = sequence.prefix[place]
            holders = self._held[block] - 1
            if holders:
                self._held[block] = holders
                continue
            del self._held[block]
            size = self._size(place)
            self.used -= size
            self._cached[block] = size
            self._num_cached += size
        self.used -= sequence.private_blocks
        sequence.private_blocks = sequence.shared = sequence.computed = 0

    def _whole(self, count: int) -> int:
        return count * self._prefix_tokens // self.block_size

    def _size(self, place: int) -> int:
        return self._whole(place + 1) - self._whole(place)
