"""The places of running sequences: the rows of the runner, and the slots of their adapters."""

from quire_engine.core.adapter_slots import AdapterSlots
from quire_engine.core.sequence import Sequence


class Rows:
    """The free rows, those returned since the previous step, and the slots for adapters."""

    def __init__(self, count: int, slots: AdapterSlots) -> None:
        self._count = count
        self._slots = slots
        self._free = list(range(count - 1, -1, -1))
        self._released: list[int] = []

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def assign(self, sequence: Sequence) -> None:
        """Give a row to a sequence, and a slot to its adapter; both must be free."""
        sequence.row = self._free.pop()
        sequence.adapter_slot = self._slots.acquire(sequence.request.adapter)

    def take_back(self, sequence: Sequence) -> None:
        """Take the row of a sequence that no longer runs, and leave its slot.

        It may be assigned again in the same step, because the runner releases before it admits.
        """
        assert sequence.row is not None
        self._released.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = None
        self._slots.release(sequence.request.adapter)

    def take_released(self) -> list[int]:
        """Return and clear the released rows, for the next batch."""
        released, self._released = self._released, []
        return released

    def check_integrity(self, held: list[int]) -> None:
        assert sorted([*held, *self._free]) == list(range(self._count)), "rows are lost or held twice"
