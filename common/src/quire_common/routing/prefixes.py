"""Which replicas have probably cached the beginning of a prompt.

A prompt is a sequence of block hashes, each over its block and all blocks before it. The index remembers which replicas
were sent which blocks last. It is a guess: a replica may have evicted a block that the index still lists.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice

_MAX_ENTRIES = 32_768
_MAX_TOTAL_ENTRIES = 131_072
"""About 20 MB. One model's full index has 5 MB; the indexes of all models in a cluster could exceed a pod's memory."""
_MAX_HOLDERS = 4
_CHECK_EVERY_BLOCKS = 1024
"""The number of recorded blocks after which the total size is checked again."""


class PrefixIndex:
    """The prefix index of one model.

    An entry counts only while its replica can still hold the block: a replica that was sent more tokens since then than
    its KV cache holds has evicted it. The least recently used entries are dropped when the index is full.
    """

    def __init__(
        self, *, max_entries: int = _MAX_ENTRIES, on_record: Callable[[int], None] = lambda count: None
    ) -> None:
        """Create an empty index; ``on_record`` is called with the number of blocks of each recorded prompt."""
        self._holders: dict[int, tuple[tuple[str, float], ...]] = {}
        """The replicas that hold a block, each with the total tokens that it had been sent by then."""
        self._sent: dict[str, float] = {}
        self._max_entries, self._on_record = max_entries, on_record

    def __len__(self) -> int:
        return len(self._holders)

    def shares(self, blocks: Sequence[int], capacities: Mapping[str, float]) -> Mapping[str, float]:
        """Return for each replica the share of these blocks that it probably holds, counted without a gap.

        ``capacities`` has the KV cache's tokens for every replica; infinite where they are not known.
        """
        found: dict[str, float] = {}
        leading = set(capacities)
        last: tuple[tuple[str, float], ...] | None = None
        for count, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            # Most blocks were sent along with the one before, and have the same holders.
            if holders != last:
                last = holders
                holding = {id_ for id_, at in holders if id_ in leading and self._sent[id_] - at <= capacities[id_]}
                if count:
                    found.update(dict.fromkeys(leading - holding, count / len(blocks)))
                leading = holding
                if not leading:
                    break
        if blocks:
            found.update(dict.fromkeys(leading, 1.0))
        return found

    def record(self, blocks: Sequence[int], id_: str, tokens: float) -> None:
        """Record that this replica now works on a prompt of these blocks and so many tokens."""
        holder = id_, self._sent.get(id_, 0.0) + tokens
        self._sent[id_] = holder[1]
        # In reverse, so that a prompt's beginning, which other prompts may share, is dropped last.
        for block in reversed(blocks):
            others = [other for other in self._holders.pop(block, ()) if other[0] != id_]
            self._holders[block] = (holder, *others)[:_MAX_HOLDERS]
        if len(self._holders) > self._max_entries:
            self.shrink(self._max_entries)
        self._on_record(len(blocks))

    def shrink(self, max_entries: int) -> None:
        """Drop the least recently used entries above ``max_entries``."""
        # Listed once: finding a dict's first key passes over the slots of all keys deleted before it.
        for block in list(islice(self._holders, max(0, len(self._holders) - max_entries))):
            del self._holders[block]

    def forget(self, ids: Collection[str]) -> None:
        """Drop replicas that are gone: a new replica of the same name starts with an empty cache."""
        gone = self._sent.keys() & set(ids)
        for id_ in gone:
            del self._sent[id_]
        if gone:
            for block, holders in self._holders.items():
                self._holders[block] = tuple(holder for holder in holders if holder[0] not in gone)


class PrefixIndexes:
    """The prefix indexes of all models, bounded together: the largest indexes shrink until the total fits."""

    def __init__(self, *, max_entries: int = _MAX_TOTAL_ENTRIES) -> None:
        self._indexes: set[PrefixIndex] = set()
        self._max_entries = max_entries
        self._recorded = 0

    def open(self) -> PrefixIndex:
        """Create the index of one more model."""
        index = PrefixIndex(on_record=self._count)
        self._indexes.add(index)
        return index

    def close(self, index: PrefixIndex) -> None:
        """Drop the index of a model that is gone."""
        self._indexes.discard(index)

    def _count(self, blocks: int) -> None:
        self._recorded += blocks
        if self._recorded >= _CHECK_EVERY_BLOCKS:
            self._recorded = 0
            self._shrink()

    def _shrink(self) -> None:
        """Reduce the largest indexes to one size: what smaller indexes leave free is shared by the larger ones."""
        free = self._max_entries
        if sum(map(len, self._indexes)) <= free:
            return
        by_size = sorted(self._indexes, key=len)
        for place, index in enumerate(by_size):
            share = free // (len(by_size) - place)
            index.shrink(share)
            free -= len(index)
