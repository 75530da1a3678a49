"""The host memory for the blocks of preempted sequences: the used blocks, and the copies of the next step.

``KVManager`` uses it; the runner performs the copies of ``take_copies``. Every KV cache group has its own host blocks,
of the size of its cache blocks. Steps take effect in order (``core.ports.Runner``), so a released host block may be
allocated by the next step, whatever is still in flight.
"""

from collections.abc import Iterable, Sequence

from quire_engine.core.batch import BlockCopies

Copies = tuple[BlockCopies, ...]
"""The copies of a step in one direction: one entry per KV cache group, or empty."""


class SwapSpace:
    """The host blocks of all groups; in every group free + taken = num_blocks."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self._out = self._no_copies()
        self._in = self._no_copies()
        self._pending = False

    def _no_copies(self) -> Copies:
        return tuple(BlockCopies() for _ in self.num_blocks)

    @property
    def exists(self) -> bool:
        """True if every group has host blocks."""
        return all(self.num_blocks)

    @property
    def num_used(self) -> int:
        return sum(self.num_blocks) - sum(map(len, self._free))

    def has_room(self, counts: Iterable[int]) -> bool:
        """Return whether each group has this many free blocks."""
        return all(count <= len(free) for count, free in zip(counts, self._free, strict=True))

    def copy_out(self, group: int, blocks: list[int]) -> list[int]:
        """Schedule copies of blocks of the cache, and return their host blocks. The caller has checked for room."""
        free, copies = self._free[group], self._out[group]
        taken = [free.pop() for _ in blocks]
        copies.sources.extend(blocks)
        copies.targets.extend(taken)
        self._pending = True
        return taken

    def copy_in(self, group: int, taken: list[int], blocks: list[int]) -> None:
        """Schedule copies of host blocks to blocks of the cache; they stay taken until ``release``."""
        copies = self._in[group]
        copies.sources.extend(taken)
        copies.targets.extend(blocks)
        self._pending = True

    def release(self, tables: list[list[int]]) -> None:
        """Release the host blocks of one sequence, in each group."""
        for free, taken in zip(self._free, tables, strict=True):
            free.extend(reversed(taken))

    def forget_copies(self, tables: list[list[int]]) -> None:
        """Drop pending copies to these host blocks, because other blocks may be copied there in the same step."""
        for copies, taken in zip(self._out, tables, strict=True):
            gone = set(taken)
            kept = [pair for pair in zip(copies.sources, copies.targets, strict=True) if pair[1] not in gone]
            copies.sources[:] = [source for source, _ in kept]
            copies.targets[:] = [target for _, target in kept]

    def take_copies(self) -> tuple[Copies, Copies]:
        """Return and clear the copies for the next step, ``Batch.swap_out`` and ``swap_in``."""
        if not self._pending:
            return (), ()
        copies = _unless_empty(self._out), _unless_empty(self._in)
        self._out, self._in, self._pending = self._no_copies(), self._no_copies(), False
        return copies

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError unless the host blocks match those of the sequences, in each group."""
        for count, free, held in zip(self.num_blocks, self._free, holders, strict=True):
            assert sorted([*free, *held]) == list(range(count)), "host blocks are lost or held twice"
        for copies in self._out:
            assert len(set(copies.targets)) == len(copies.targets), "two blocks are copied to one host block"
        assert not any(copies.sources for copies in self._in), "copies that no batch has taken"


def _unless_empty(copies: Copies) -> Copies:
    return copies if any(of_group.sources for of_group in copies) else ()
