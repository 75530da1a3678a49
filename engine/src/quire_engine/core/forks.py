"""Forked sequences of one request (n > 1): the first one computes the prompt, the others wait for it.

A child waits outside the queue until a step schedules the end of its parent's prompt. Steps take effect in order, so it
may be admitted in that same step: it finds the full blocks of the prompt and computes the rest, at most one block. If
the parent loses its blocks before, its children stay with it; if it ends, they enter the queue. ``Scheduler`` moves
them; nothing here knows blocks.
"""

from quire_engine.core.sequence import Sequence


class ParkedChildren:
    """The forked sequences that wait for their parent, in arrival order per parent.

    No operation of a step visits parents that do not run.
    """

    def __init__(self) -> None:
        self._children: dict[int, list[Sequence]] = {}  # by the parent's key
        self._running: dict[int, Sequence] = {}  # parents that were admitted
        self._length = 0
        self.num_tokens = 0
        """The tokens of the waiting children, as ``WaitingQueue`` counts them; how many they will find is not known
        yet."""

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
        """Record that a sequence runs; it may have no children."""
        if parent.key in self._children:
            self._running[parent.key] = parent

    def preempted(self, parent: Sequence) -> None:
        self._running.pop(parent.key, None)

    def take_ready(self) -> list[tuple[Sequence, list[Sequence]]]:
        """Remove and return the children of parents whose prompt is computed or scheduled to be, with the parents."""
        ready = [parent for parent in self._running.values() if parent.num_computed >= parent.num_prompt]
        return [(parent, self.take_all(parent)) for parent in ready]

    def take_all(self, parent: Sequence) -> list[Sequence]:
        """Remove and return all children of a parent, which ends."""
        self._running.pop(parent.key, None)
        children = self._children.pop(parent.key, [])
        for child in children:
            self._left(child)
        return children

    def discard(self, child: Sequence) -> None:
        """Remove a waiting child that ended."""
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
        """Raise AssertionError unless every child waits for an unfinished prompt and the counts are right."""
        parked = self.sequences()
        assert (len(parked), sum(child.num_tokens for child in parked)) == (self._length, self.num_tokens)
        for child in parked:
            parent = child.parent
            assert parent is not None and alive.get(parent.key) is parent, "parked with one that is gone"
            assert (parent.row is not None) == (parent.key in self._running)
            assert parent.row is None or parent.num_computed < parent.num_prompt, "parked though the prompt is there"
            assert child.row is None and child.swap_tables is None and not child.token_ids[child.num_prompt :]
        assert all(key in self._children for key in self._running)
