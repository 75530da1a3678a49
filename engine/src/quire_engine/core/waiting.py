"""The sequences that have no row: those never admitted, and those preempted.

It is a heap by order. A sequence that leaves from the middle (cancelled, or ended by a token sampled before its
preemption) is only marked, and dropped when it comes up or when the marked ones outnumber the rest. No operation visits
the whole queue, whatever its length.
"""

from heapq import heapify, heappop, heappush

from quire_engine.core.sequence import Order, Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[Order, Sequence]] = []
        self._length = 0
        self.num_tokens = 0
        """The tokens that these sequences have to compute before they sample another one."""

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        heappush(self._heap, (sequence.order, sequence))
        self._length += 1
        self.num_tokens += sequence.num_tokens - sequence.num_computed

    def first(self) -> Sequence | None:
        heap = self._heap
        while heap and heap[0][1].finished:
            heappop(heap)
        return heap[0][1] if heap else None

    def pop(self) -> Sequence:
        sequence = self.first()
        assert sequence is not None
        heappop(self._heap)
        self._forget(sequence)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is ``finished``."""
        assert sequence.finished and sequence.row is None
        self._forget(sequence)
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapify(self._heap)

    def grew(self, sequence: Sequence, count: int) -> None:
        """Count so many more tokens of a waiting sequence."""
        assert sequence.row is None
        self.num_tokens += count

    def _forget(self, sequence: Sequence) -> None:
        self._length -= 1
        self.num_tokens -= sequence.num_tokens - sequence.num_computed

    def sequences(self) -> list[Sequence]:
        """Return all of them, in no order; for checks and reports, not for the step."""
        return [sequence for _, sequence in self._heap if not sequence.finished]
