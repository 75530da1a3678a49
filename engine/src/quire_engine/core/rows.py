"""The rows of the runner: the free ones, and those returned since the previous step."""

from quire_engine.core.sequence import Sequence


class Rows:
    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._released: list[int] = []

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    def take(self) -> int:
        return self._free.pop()

    def take_back(self, sequence: Sequence) -> None:
        """Take the row of a sequence that no longer runs.

        It may be assigned again in the same step, because the runner releases before it admits.
        """
        assert sequence.row is not None
        self._released.append(sequence.row)
        self._free.append(sequence.row)
        sequence.row = None

    def take_released(self) -> list[int]:
        """Return and clear the released rows, for the next batch."""
        released, self._released = self._released, []
        return released

    def check_integrity(self, held: list[int]) -> None:
        assert sorted([*held, *self._free]) == list(range(self._count)), "rows are lost or held twice"
