"""Block tables: which blocks hold a sequence's keys and values, in every KV cache group.

The scheduler asks; ``BlockPool`` keeps the blocks. All groups share one block size, so a sequence's tables grow
together, all or none; they differ in what they let go of: a sliding-window group gives back blocks that no later query
can see. Whatever changed is collected for the runner (``take_updates``).
"""

from dataclasses import dataclass

from quire_engine.core.batch import BlockUpdates
from quire_engine.core.block_pool import BlockPool
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.prefix_cache import extend_chain, root_digest
from quire_engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    pool: BlockPool
    window: int | None


class KVManager:
    """``max_chunk`` bounds the tokens of one sequence in one step; what ``headroom`` blocks are for, ``admit`` says."""

    def __init__(
        self, layout: KVCacheLayout, *, max_chunk: int, enable_prefix_caching: bool, headroom: float = 0.01
    ) -> None:
        self.layout = layout
        self._block_size = layout.block_size
        self._groups = tuple(_Group(pool=BlockPool(group.num_blocks), window=group.window) for group in layout.groups)
        self._windowed = tuple(index for index, group in enumerate(layout.groups) if group.window is not None)
        self.max_chunk = min([max_chunk, *(self._largest_chunk(self._groups[index]) for index in self._windowed)])
        if self.max_chunk < 1:
            raise ValueError("a sliding-window KV cache group is smaller than its window: not one sequence fits")
        self._headroom = [int(group.num_blocks * headroom) for group in layout.groups]
        self._caching = enable_prefix_caching
        self._updates = tuple(BlockUpdates() for _ in self._groups)

    # --- sizes ---

    def _largest_chunk(self, group: _Group) -> int:
        """Such that the window before a chunk and the chunk itself fit, wherever in a block they begin."""
        assert group.window is not None
        return (group.pool.num_blocks - 1) * self._block_size + 2 - group.window

    def _blocks_at_most(self, group: _Group, num_tokens: int) -> int:
        """The most blocks a sequence of that many tokens ever holds in this group."""
        blocks = -(-num_tokens // self._block_size)
        if group.window is None:
            return blocks
        span = group.window - 1 + min(num_tokens, self.max_chunk)
        return min(blocks, (span + self._block_size - 2) // self._block_size + 1)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        return tuple(group.pool for group in self._groups)

    def num_free(self) -> list[int]:
        """Free blocks of each group."""
        return [group.pool.num_free for group in self._groups]

    def wasted_slots(self, sequences: list[Sequence]) -> int:
        """Allocated token slots that hold no token, once the steps under way are done."""
        return sum(sequence.capacity - sequence.num_computed for sequence in sequences) * len(self._groups)

    # --- admission ---

    def admit(self, sequence: Sequence, *, budget: int, alone: bool) -> int | None:
        """Give a sequence the blocks of its first chunk; tokens in that chunk, or None where it has to wait.

        The whole of what it must compute has to fit, though only the first chunk's blocks are taken now: while a chunk
        is left the budget is spent, so nobody is admitted behind it. ``headroom`` blocks stay free besides, unless it
        is ``alone``, lest the next decode steps preempt it at once.
        """
        hit = self._find_prefix(sequence) if self._caching else 0
        position = hit * self._block_size
        firsts = [self._first_visible(group, position) for group in self._groups]
        found = [
            [group.pool.find_published(digest) for digest in sequence.digests[first:hit]]
            for group, first in zip(self._groups, firsts, strict=True)
        ]
        for group, blocks, headroom in zip(self._groups, found, self._headroom, strict=True):
            needed = max(0, self._blocks_at_most(group, sequence.num_tokens) - len(blocks))
            revived = sum(map(group.pool.is_free, blocks))
            if needed + revived > group.pool.num_free - (0 if alone else headroom):
                return None
        for index, group in enumerate(self._groups):
            group.pool.touch(found[index])
            self._record(index, sequence, firsts[index], found[index])
        sequence.num_computed = sequence.capacity = position
        sequence.block_tables, sequence.first_blocks = found, firsts
        sequence.num_published = hit
        chunk = min(sequence.num_tokens - position, budget, self.max_chunk)
        extended = self.extend(sequence, position + chunk)
        assert extended, "a chunk of a prompt that fits as a whole did not fit"
        return chunk

    def _first_visible(self, group: _Group, position: int) -> int:
        """The first block of which a query at ``position`` sees anything."""
        return 0 if group.window is None else max(0, position + 1 - group.window) // self._block_size

    # --- growing and letting go ---

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Make the block tables reach ``end`` tokens, which the caller then schedules in this very step; False, and
        nothing taken, where a group has too few blocks."""
        for index in self._windowed:
            self._leave_behind(index, sequence)
        missing = -(-(end - sequence.capacity) // self._block_size)
        if missing <= 0:
            return True
        for group in self._groups:
            if group.pool.num_free < missing:
                return False
        place = sequence.capacity // self._block_size
        for index, group in enumerate(self._groups):
            blocks = group.pool.allocate(missing)
            sequence.block_tables[index] += blocks
            self._record(index, sequence, place, blocks)
        sequence.capacity += missing * self._block_size
        if self._caching:
            self._publish(sequence, min(end, len(sequence.token_ids)))
        return True

    def _leave_behind(self, index: int, sequence: Sequence) -> None:
        group = self._groups[index]
        count = self._first_visible(group, sequence.num_computed) - sequence.first_blocks[index]
        if count > 0:
            if self._caching:
                self._publish(sequence, min(sequence.num_computed, len(sequence.token_ids)))
            table = sequence.block_tables[index]
            group.pool.release(table[:count])
            del table[:count]
            sequence.first_blocks[index] += count

    def release(self, sequence: Sequence) -> None:
        """Take all blocks back; what they hold may still be found by its prefix."""
        if self._caching:
            self._publish(sequence, min(sequence.num_computed, len(sequence.token_ids)))
        for index, group in enumerate(self._groups):
            group.pool.release(sequence.block_tables[index])
            sequence.block_tables[index] = []
            sequence.first_blocks[index] = 0
        sequence.capacity = sequence.num_computed = sequence.num_published = 0

    def _record(self, index: int, sequence: Sequence, place: int, blocks: list[int]) -> None:
        assert sequence.row is not None
        updates = self._updates[index]
        updates.rows.extend([sequence.row] * len(blocks))
        updates.positions.extend(range(place, place + len(blocks)))
        updates.blocks.extend(blocks)

    def take_updates(self) -> tuple[BlockUpdates, ...]:
        """What was appended to block tables since the last call."""
        updates, self._updates = self._updates, tuple(BlockUpdates() for _ in self._groups)
        return updates

    # --- prefixes ---

    def _find_prefix(self, sequence: Sequence) -> int:
        """Leading blocks that every group still holds, as far as a query after them can see; at least one token is
        left to compute, since the next one is drawn from what it gives, and all whose logits are asked for."""
        most = (sequence.num_tokens - 1) // self._block_size
        if sequence.num_reported < sequence.num_to_report:
            most = min(most, sequence.num_reported // self._block_size)
        hit = 0
        while hit < most and self._is_published(sequence, hit):
            hit += 1
        before = None
        while hit != before:
            before = hit
            for index in self._windowed:
                hit = self._find_window(self._groups[index], sequence, hit)
        return hit

    def _is_published(self, sequence: Sequence, place: int) -> bool:
        """In every full-attention group; windowed groups are looked at afterwards."""
        self._extend_digests(sequence, place + 1)
        digest = sequence.digests[place]
        return all(group.window is not None or group.pool.find(digest) is not None for group in self._groups)

    def _find_window(self, group: _Group, sequence: Sequence, most: int) -> int:
        """The longest prefix of at most that many blocks of which the group holds all that is still visible."""
        end = most
        for place in range(most - 1, -1, -1):
            if place < self._first_visible(group, end * self._block_size):
                return end
            if group.pool.find(sequence.digests[place]) is None:
                end = place
        return end

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Let the blocks be found which are full with the first ``num_tokens`` tokens."""
        full = num_tokens // self._block_size
        full = min(full, sequence.capacity // self._block_size)
        if full <= sequence.num_published:
            return
        self._extend_digests(sequence, full)
        for index, group in enumerate(self._groups):
            first, table = sequence.first_blocks[index], sequence.block_tables[index]
            for place in range(max(first, sequence.num_published), full):
                group.pool.publish(table[place - first], sequence.digests[place])
        sequence.num_published = full

    def _extend_digests(self, sequence: Sequence, upto: int) -> None:
        if len(sequence.digests) < upto:
            request = sequence.request
            root = (
                b"" if sequence.digests else root_digest(adapter_id=request.adapter_id, cache_salt=request.cache_salt)
            )
            extend_chain(sequence.digests, sequence.token_ids, root=root, block_size=self._block_size, upto=upto)

    def forget_prefixes(self) -> None:
        for group in self._groups:
            group.pool.forget()

    # --- conservation ---

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Every block is free or held by as many sequences as it counts, and every table reaches what it should."""
        for sequence in waiting:
            assert not any(sequence.block_tables) and sequence.capacity == 0
        for index, group in enumerate(self._groups):
            holders: dict[int, list[bytes | None]] = {}
            for sequence in running:
                first, table = sequence.first_blocks[index], sequence.block_tables[index]
                assert (first + len(table)) * self._block_size == sequence.capacity
                assert sequence.num_computed <= sequence.capacity
                for place, block in enumerate(table, start=first):
                    digest = sequence.digests[place] if place < sequence.num_published else None
                    holders.setdefault(block, []).append(digest)
            for block, digests in holders.items():
                shared = len(digests) > 1
                assert not shared or (digests[0] is not None and len(set(digests)) == 1), (
                    f"block {block} is in two sequences"
                )
            group.pool.check_integrity({block: len(digests) for block, digests in holders.items()})
        assert not any(updates.rows for updates in self._updates), "block updates that no batch has taken"
