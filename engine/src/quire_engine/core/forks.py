"""Sequences of one request, n > 1: the first of them computes the prompt, the others come when it is there.

A child is parked beside its parent, out of the queue, until a step schedules the end of the parent's prompt. Steps take
effect in order, so it may be admitted in that very step: it finds the full blocks of the prompt and computes what is
left, a block at most. Should the parent lose its blocks before, its children stay with it; should it end, they go
their own way. ``Scheduler`` moves them; nothing here knows blocks.
"""

from quire_engine.core.sequence import Sequence


class ParkedChildren:
    """By parent, in the order in which they came. No operation of a step looks at parents that do not run."""

    def __init__(self) -> None:
        self._children: dict[int, list[Sequence]] = {}  # by the parent's key
        self._running: dict[int, Sequence] = {}  # parents that were admitted
        self._length = 0
        self.num_tokens = 0
        """Of the parked ones, as ``WaitingQueue`` counts them: what of it they will find is not known yet."""

    def __len__(self) -> int:
        return self._length

    def park(self, child: Sequence, parent: Sequence) -> None:
        assert not parent.finished and child.parent is None
        child.parent = parent
        self._children.setdefault(parent.key, []).append(child)
        if parent.row is not None:
            self._running[parent.key] = parent
        self._length += 1
        self.num_tokens += child.num_tokens

    def admitted(self, parent: Sequence) -> None:
        """It runs; it may have no children."""
        if parent.key in self._children:
            self._running[parent.key] = parent

    def preempted(self, parent: Sequence) -> None:
        self._running.pop(parent.key, None)

    def take_ready(self) -> list[tuple[Sequence, list[Sequence]]]:
        """Parents whose prompt is computed or scheduled to be, with their children, who leave."""
        ready = [parent for parent in self._running.values() if parent.num_computed >= parent.num_prompt]
        return [(parent, self.take_all(parent)) for parent in ready]

    def take_all(self, parent: Sequence) -> list[Sequence]:
        """Its children, who leave; for a parent that ends."""
        self._running.pop(parent.key, None)
        children = self._children.pop(parent.key, [])
        for child in children:
            self._left(child)
        return children

    def discard(self, child: Sequence) -> None:
        """A parked one that ended."""
        assert child.finished and child.parent is not None
        siblings = self._children[child.parent.key]
        siblings.remove(child)
        if not siblings:
            self.take_all(child.parent)
        self._left(child)

    def _left(self, child: Sequence) -> None:
        child.parent = None
        self._length -= 1
        self.num_tokens -= child.num_tokens

    def sequences(self) -> list[Sequence]:
        return [child for children in self._children.values() for child in children]

    def check_integrity(self, alive: dict[int, Sequence]) -> None:
        """After a step: nobody is parked for nothing, and the numbers are those of who is."""
        parked = self.sequences()
        assert (len(parked), sum(child.num_tokens for child in parked)) == (self._length, self.num_tokens)
        for child in parked:
            parent = child.parent
            assert parent is not None and alive.get(parent.key) is parent, "parked with one that is gone"
            assert (parent.row is not None) == (parent.key in self._running)
            assert parent.row is None or parent.num_computed < parent.num_prompt, "parked though the prompt is there"
            assert child.row is None and child.swap_tables is None and not child.token_ids[child.num_prompt :]
        assert all(key in self._children for key in self._running)
