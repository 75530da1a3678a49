"""The block tables: the blocks that hold a sequence's keys and values, in every KV cache group.

The scheduler uses it; ``BlockPool`` owns the blocks, ``PrefixCache`` finds them again, ``SwapSpace`` owns those of the
host. All groups share one block size, so a sequence's tables grow together, all or none. They differ in what they
release: a sliding-window group returns blocks that no later query can see. Changes are collected for the runner
(``take_updates``, ``take_copies``).
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire_engine.core.batch import BlockUpdates
from quire_engine.core.block_pool import BlockPool, KVGroup
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.options import SharePrefixes
from quire_engine.core.preemption import SwapRoom
from quire_engine.core.preemption_cost import PreemptionWork
from quire_engine.core.prefix_cache import PrefixCache
from quire_engine.core.sequence import Sequence
from quire_engine.core.swap_space import SwapSpace

_HEADROOM = 0.01
"""The share of the blocks that stay free when a sequence is placed; see ``KVManager.place``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The position at which a waiting sequence would continue, and its blocks in the cache or in the swap space."""

    position: int
    """The number of tokens that need not be computed."""
    first_blocks: list[int]
    found: list[list[int | None]]
    """Per group, the blocks of these tokens from ``first_blocks`` on; None for a block that must be copied in."""
    swapped: bool
    """True if the sequence continues from its own blocks in the swap space."""


class KVManager:
    """The owner of block tables.

    ``max_chunk`` bounds the tokens of one sequence in one step.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        *,
        max_chunk: int,
        enable_prefix_caching: bool,
        share_prefixes: SharePrefixes,
    ) -> None:
        self._block_size = layout.block_size
        self._groups = tuple(
            KVGroup(pool=BlockPool(group.num_blocks), block_size=layout.block_size, window=group.window)
            for group in layout.groups
        )
        self._windowed = tuple(index for index, group in enumerate(layout.groups) if group.window is not None)
        self.max_chunk = min([max_chunk, *(self._groups[index].largest_chunk() for index in self._windowed)])
        if self.max_chunk < 1:
            raise ValueError("a sliding-window KV cache group is smaller than its window: not one sequence fits")
        self._headroom = [int(group.num_blocks * _HEADROOM) for group in layout.groups]
        self._prefixes = PrefixCache(
            self._groups, block_size=layout.block_size, enabled=enable_prefix_caching, share=share_prefixes
        )
        self.swap_space = SwapSpace([group.num_swap_blocks for group in layout.groups])
        self._updates = tuple(BlockUpdates() for _ in self._groups)

    @property
    def pools(self) -> tuple[BlockPool, ...]:
        return tuple(group.pool for group in self._groups)

    def num_free(self) -> list[int]:
        """Return the free blocks of each group."""
        return [group.pool.num_free for group in self._groups]

    def wasted_slots(self, sequences: list[Sequence]) -> int:
        """Return the allocated token slots that hold no token after the steps in flight."""
        return sum(sequence.capacity - sequence.num_computed for sequence in sequences) * len(self._groups)

    def place(self, sequence: Sequence, *, alone: bool, begun: Iterable[Sequence]) -> Placement | None:
        """Return where a waiting sequence would continue if it were admitted now, or None if it has to wait.

        All tokens that it must compute have to fit, although only the first chunk's blocks are allocated at admission.
        Blocks that the partly prefilled sequences (`begun`) still need are reserved. Unless the sequence is ``alone``,
        ``_HEADROOM`` of the blocks stay free in addition, so that the next decode steps do not preempt it at once.
        """
        placement = self._look_up(sequence)
        for index, group in enumerate(self._groups):
            blocks = [block for block in placement.found[index] if block is not None]
            needed = max(0, self._blocks_at_most(group, sequence) - len(blocks)) + sum(map(group.pool.is_free, blocks))
            for other in begun:
                needed += max(0, self._blocks_at_most(group, other) - len(other.block_tables[index]))
            if needed > group.pool.num_free - (0 if alone else self._headroom[index]):
                return None
        return placement

    def _blocks_at_most(self, group: KVGroup, sequence: Sequence) -> int:
        return group.blocks_at_most(sequence.num_tokens, max_chunk=self.max_chunk)

    def _look_up(self, sequence: Sequence) -> Placement:
        hit = self._prefixes.find(sequence)
        position = hit * self._block_size
        if sequence.swap_tables is not None and sequence.num_computed > position:
            return self._look_up_swapped(sequence, sequence.swap_tables)
        firsts = [group.first_visible(position) for group in self._groups]
        return Placement(
            position=position,
            first_blocks=firsts,
            found=[
                [group.pool.find(digest) for digest in sequence.digests[first:hit]]
                for group, first in zip(self._groups, firsts, strict=True)
            ],
            swapped=False,
        )

    def _look_up_swapped(self, sequence: Sequence, tables: list[list[int]]) -> Placement:
        """Return the placement of a swapped sequence.

        Blocks that are still in the cache need not be copied in.
        """
        return Placement(
            position=sequence.num_computed,
            first_blocks=list(sequence.first_blocks),
            found=[
                self._prefixes.find_each(sequence, group, first, len(taken))
                for group, first, taken in zip(self._groups, sequence.first_blocks, tables, strict=True)
            ],
            swapped=True,
        )

    def enter(self, sequence: Sequence, placement: Placement, *, budget: int) -> int:
        """Allocate the blocks of an admitted sequence, which has a row; return the tokens of its first chunk."""
        for index in range(len(self._groups)):
            table = self._take(index, placement.found[index], sequence)
            sequence.block_tables[index] = table
            self._record(index, sequence, placement.first_blocks[index], table)
        self._drop_swapped(sequence)
        position = placement.position
        sequence.first_blocks = placement.first_blocks
        sequence.num_computed = position
        sequence.capacity = -(-position // self._block_size) * self._block_size
        sequence.num_published = 0
        self._prefixes.publish(sequence, position)
        chunk = min(sequence.num_tokens - position, budget, self.max_chunk)
        extended = self.extend(sequence, position + chunk)
        assert extended, "a chunk of a prompt that fits as a whole did not fit"
        return chunk

    def _take(self, index: int, found: list[int | None], sequence: Sequence) -> list[int]:
        """Return the blocks that were found, and new ones for the others, which are copied in."""
        pool = self._groups[index].pool
        # Before any allocation, so that a found block is not allocated.
        pool.touch(block for block in found if block is not None)
        missing = [place for place, block in enumerate(found) if block is None]
        fresh = pool.allocate(len(missing))
        if missing:
            assert sequence.swap_tables is not None
            taken = sequence.swap_tables[index]
            self.swap_space.copy_in(index, [taken[place] for place in missing], fresh)
        blocks = iter(fresh)
        return [next(blocks) if block is None else block for block in found]

    def extend(self, sequence: Sequence, end: int) -> bool:
        """Extend the block tables to ``end`` tokens, which the caller schedules in this same step.

        Return False, without any change, if a group has too few blocks.
        """
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
        self._prefixes.publish(sequence, end)
        return True

    def extend_for_drafts(self, sequence: Sequence, end: int, *, others: int) -> int:
        """Extend the block tables to at most ``end`` tokens; return the tokens that they cover.

        Drafts take no block that one of ``others`` sequences may need in the same step.
        """
        if end > sequence.capacity and all(group.pool.num_free > others for group in self._groups):
            self.extend(sequence, end)
        return min(end, sequence.capacity)

    def leave_behind(self, running: list[Sequence]) -> None:
        """Release all blocks outside the windows of running sequences if such blocks are scarce.

        Each sequence otherwise does so only when it grows by a block. Call this before a step is planned, so that the
        step's own blocks are not released.
        """
        for index in self._windowed:
            most = len(running) + self.max_chunk // self._block_size + 1
            if self._groups[index].pool.num_free < most:
                for sequence in running:
                    self._leave_behind(index, sequence)

    def _leave_behind(self, index: int, sequence: Sequence) -> None:
        group = self._groups[index]
        count = group.first_visible(sequence.num_computed) - sequence.first_blocks[index]
        if count > 0:
            self._prefixes.publish(sequence, sequence.num_computed)
            table = sequence.block_tables[index]
            group.pool.release(table[:count])
            del table[:count]
            sequence.first_blocks[index] += count

    def release(self, sequence: Sequence) -> None:
        """Release all blocks; their content may still be found by its prefix."""
        self._give_back(sequence)
        sequence.first_blocks = [0] * len(self._groups)
        sequence.num_computed = 0

    def _give_back(self, sequence: Sequence) -> None:
        self._prefixes.publish(sequence, sequence.num_computed)
        for index, group in enumerate(self._groups):
            group.pool.release(sequence.block_tables[index])
            sequence.block_tables[index] = []
        sequence.capacity = sequence.num_published = 0

    def _record(self, index: int, sequence: Sequence, place: int, blocks: list[int]) -> None:
        assert sequence.row is not None
        updates = self._updates[index]
        updates.rows.extend([sequence.row] * len(blocks))
        updates.positions.extend(range(place, place + len(blocks)))
        updates.blocks.extend(blocks)

    def take_updates(self) -> tuple[BlockUpdates, ...]:
        """Return and clear the blocks appended to block tables since the last call."""
        updates, self._updates = self._updates, tuple(BlockUpdates() for _ in self._groups)
        return updates

    def prepare_to_lose(self, victim: Sequence) -> PreemptionWork:
        """Return the work to restore a victim, by recompute and by swap."""
        for index in self._windowed:
            self._leave_behind(index, victim)
        total = -(-victim.num_computed // self._block_size)
        counts = [total - first for first in victim.first_blocks]
        shared = min(self._num_shared(index, victim) for index in range(len(self._groups)))
        return PreemptionWork(
            tokens=victim.num_computed - min(shared * self._block_size, victim.num_computed),
            blocks_out=tuple(counts),
            blocks_in=tuple(max(0, count - shared) for count in counts),
        )

    def _num_shared(self, index: int, victim: Sequence) -> int:
        """Return the leading blocks that another sequence also holds: they remain if the victim returns soon."""
        if victim.first_blocks[index]:
            return 0
        pool, shared = self._groups[index].pool, 0
        for block in victim.block_tables[index]:
            if not pool.is_shared(block):
                break
            shared += 1
        return shared

    def swap_room(self, counts: tuple[int, ...]) -> SwapRoom:
        if not self.swap_space.exists:
            return "none"
        return "enough" if self.swap_space.has_room(counts) else "full"

    def swap_out(self, victim: Sequence, counts: tuple[int, ...]) -> None:
        """Schedule copies of the victim's computed blocks to the swap space, and release its blocks of the cache.

        The victim keeps ``num_computed`` and ``first_blocks``, which describe its host blocks.
        """
        victim.swap_tables = [
            self.swap_space.copy_out(index, victim.block_tables[index][:count]) for index, count in enumerate(counts)
        ]
        self._give_back(victim)

    def _drop_swapped(self, sequence: Sequence) -> None:
        """Release the sequence's host blocks, if it has any: they are copied in or no longer needed."""
        tables, sequence.swap_tables = sequence.swap_tables, None
        if tables is not None:
            self.swap_space.release(tables)

    def discard_swapped(self, sequence: Sequence) -> None:
        """Release the host blocks of a sequence that ended, and drop its pending copies."""
        if sequence.swap_tables is not None:
            self.swap_space.forget_copies(sequence.swap_tables)
            self._drop_swapped(sequence)

    def publish_computed(self, sequence: Sequence) -> None:
        """Make all full blocks of a sequence findable, including the last one."""
        self._prefixes.publish(sequence, sequence.num_computed)

    def forget_prefixes(self, waiting: list[Sequence]) -> None:
        """Clear the prefix cache; waiting sequences without blocks start a new chain."""
        self._prefixes.forget()
        for sequence in waiting:
            if sequence.swap_tables is None:
                sequence.digests.clear()

    def check_integrity(self, running: list[Sequence], waiting: list[Sequence]) -> None:
        """Raise AssertionError unless the references and the lengths of all block tables are right."""
        for sequence in waiting:
            assert not any(sequence.block_tables) and sequence.capacity == sequence.num_published == 0
            assert (sequence.num_computed > 0) == (sequence.swap_tables is not None)
        for index, group in enumerate(self._groups):
            holders: dict[int, list[bytes | None]] = {}
            for sequence in running:
                assert sequence.swap_tables is None
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
        self._check_swapped(waiting)
        assert not any(updates.rows for updates in self._updates), "block updates that no batch has taken"

    def _check_swapped(self, waiting: list[Sequence]) -> None:
        held: list[list[int]] = [[] for _ in self._groups]
        for sequence in waiting:
            for index, taken in enumerate(sequence.swap_tables or ()):
                blocks = -(-sequence.num_computed // self._block_size)
                assert sequence.first_blocks[index] + len(taken) == blocks, "host blocks for other tokens"
                held[index] += taken
        self.swap_space.check_integrity(held)
