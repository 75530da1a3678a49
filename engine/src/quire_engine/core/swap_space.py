"""Host memory for the blocks of preempted sequences: which of it is taken, and what the next step copies.

``KVManager`` asks; the runner copies what ``take_copies`` names. Every KV cache group has host blocks of its own, of
the size of its cache blocks. Steps take effect in order (``core.ports.Runner``), so a host block that is given back may
be given out again by the next step, whatever is still under way.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quire_engine.core.batch import BlockCopies


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapCopies:
    """As ``Batch.swap_out`` and ``swap_in`` have it: one entry per KV cache group, or none."""

    swap_out: tuple[BlockCopies, ...] = ()
    swap_in: tuple[BlockCopies, ...] = ()

    @property
    def num_out(self) -> int:
        return sum(len(copies.sources) for copies in self.swap_out)

    @property
    def num_in(self) -> int:
        return sum(len(copies.sources) for copies in self.swap_in)


_NO_COPIES = SwapCopies()


class SwapSpace:
    """free + taken = num_blocks, in every group."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self.num_blocks = tuple(num_blocks)
        self._free = [list(range(count - 1, -1, -1)) for count in num_blocks]
        self._out = self._no_copies()
        self._in = self._no_copies()
        self._pending = False

    def _no_copies(self) -> tuple[BlockCopies, ...]:
        return tuple(BlockCopies() for _ in self.num_blocks)

    @property
    def exists(self) -> bool:
        """Whether every group has some."""
        return all(self.num_blocks)

    @property
    def num_used(self) -> int:
        return sum(self.num_blocks) - sum(map(len, self._free))

    def has_room(self, counts: Iterable[int]) -> bool:
        """For so many blocks of each group."""
        return all(count <= len(free) for count, free in zip(counts, self._free, strict=True))

    def copy_out(self, group: int, blocks: list[int]) -> list[int]:
        """Have these blocks of the cache copied; the host blocks they go to. The caller has asked for room."""
        free, copies = self._free[group], self._out[group]
        taken = [free.pop() for _ in blocks]
        copies.sources.extend(blocks)
        copies.targets.extend(taken)
        self._pending = True
        return taken

    def copy_in(self, group: int, taken: list[int], blocks: list[int]) -> None:
        """Have host blocks copied to blocks of the cache; they stay taken until ``release``."""
        copies = self._in[group]
        copies.sources.extend(taken)
        copies.targets.extend(blocks)
        self._pending = self._pending or bool(blocks)

    def release(self, tables: list[list[int]]) -> None:
        """Give back the host blocks of one sequence, those of each group."""
        for free, taken in zip(self._free, tables, strict=True):
            free.extend(reversed(taken))

    def forget_copies(self, tables: list[list[int]]) -> None:
        """Leave out what was to be copied there and in no step yet: another's blocks may go there in the same step."""
        if not self._pending:
            return
        for copies, taken in zip(self._out, tables, strict=True):
            gone = set(taken)
            kept = [pair for pair in zip(copies.sources, copies.targets, strict=True) if pair[1] not in gone]
            copies.sources[:] = [source for source, _ in kept]
            copies.targets[:] = [target for _, target in kept]

    def take_copies(self) -> SwapCopies:
        """What the next step has to copy."""
        if not self._pending:
            return _NO_COPIES
        copies = SwapCopies(swap_out=_unless_empty(self._out), swap_in=_unless_empty(self._in))
        self._out, self._in, self._pending = self._no_copies(), self._no_copies(), False
        return copies

    def check_integrity(self, holders: Sequence[Sequence[int]]) -> None:
        """Compare with the host blocks that sequences say they hold, of each group."""
        for count, free, held in zip(self.num_blocks, self._free, holders, strict=True):
            assert sorted([*free, *held]) == list(range(count)), "host blocks are lost or held twice"
        for copies in self._out:
            assert len(set(copies.targets)) == len(copies.targets), "two blocks are copied to one host block"
        assert not any(copies.sources for copies in self._in), "copies that no batch has taken"


def _unless_empty(copies: tuple[BlockCopies, ...]) -> tuple[BlockCopies, ...]:
    return copies if any(of_group.sources for of_group in copies) else ()
