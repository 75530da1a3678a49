"""The delay before changes of other clients are reverted: none at first, and longer each time they come back.

``reconcile`` uses it for each object that it writes. Without it, two controllers of one field, or two operators that
were started by mistake with different Leases, would write as fast as their watches report changes.
"""

from dataclasses import dataclass

from quire_operator.domain.cluster_state.observed import Ref

STATUS = Ref("status", "")
"""The status of the LLMDeployment itself, which is repaired like its children."""
_AT_ONCE = 3
_MAX_SECONDS = 600.0
_FORGOTTEN_SECONDS = 2 * _MAX_SECONDS
_BY_A_TWIN = "another process writes as field manager quire; check for a second operator with another Lease name"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repairs:
    """The recent repairs of one change of one object."""

    times: int
    last: float

    def wait_seconds(self, now: float) -> float:
        if self.are_forgotten(now) or self.times < _AT_ONCE:
            return 0.0
        pause = min(_MAX_SECONDS, 2.0 ** (self.times - _AT_ONCE + 1))
        return max(0.0, self.last + pause - now)

    def are_forgotten(self, now: float) -> bool:
        # After the clock was set back, the wait must not be longer than its maximum.
        return not 0.0 <= now - self.last < _FORGOTTEN_SECONDS


class RepairLog:
    """The repairs of one LLMDeployment, in memory only: after a restart the first repairs are immediate.

    A change is identified by the object, the fields and their manager, if these are known. So a person who tries
    different values is not mistaken for a controller that repeats one change.
    """

    def __init__(self) -> None:
        self._repairs: dict[tuple[Ref, str], _Repairs] = {}

    def wait_seconds(self, ref: Ref, what: str, now: float) -> float:
        """Return how many seconds the next repair of this change has to wait; 0 for none."""
        known = self._repairs.get((ref, what))
        return 0.0 if known is None else known.wait_seconds(now)

    def note(self, ref: Ref, what: str, now: float) -> None:
        """Record a repair at this time."""
        self._repairs = {change: known for change, known in self._repairs.items() if not known.are_forgotten(now)}
        known = self._repairs.get((ref, what))
        self._repairs[ref, what] = _Repairs(times=1 if known is None else known.times + 1, last=now)

    def contests(self, now: float) -> str:
        """Return a message about changes that come back repeatedly, or "". One or two are taken for manual changes."""
        found = []
        for (ref, what), known in self._repairs.items():
            if known.times >= _AT_ONCE and not known.are_forgotten(now):
                whose = "its status" if ref == STATUS else str(ref)
                found.append(f"{whose} is repeatedly changed by another client and reverted: {what or _BY_A_TWIN}")
        return "; ".join(found)
