"""How soon what others changed is set back: at once, and ever more slowly where it comes back again and again.

Used by ``reconcile`` for each object it writes. Without it two controllers of one field, or two operators that were
started by mistake with Leases of different names, would write as fast as their watches tell.
"""

from dataclasses import dataclass

from quire_operator.domain.cluster_state.observed import Ref

STATUS = Ref("status", "")
"""The status of the LLMDeployment itself, beside its children."""
_AT_ONCE = 3
_MAX_SECONDS = 600.0
_FORGOTTEN_SECONDS = 2 * _MAX_SECONDS
_BY_A_TWIN = "another process writes as field manager quire; check for a second operator with another Lease name"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Repairs:
    """Those of one object and one change, of late."""

    times: int
    last: float

    def wait_seconds(self, now: float) -> float:
        if self.are_forgotten(now) or self.times < _AT_ONCE:
            return 0.0
        pause = min(_MAX_SECONDS, 2.0 ** (self.times - _AT_ONCE + 1))
        return max(0.0, self.last + pause - now)

    def are_forgotten(self, now: float) -> bool:
        # A clock that was set back must not make the wait longer than it can be.
        return not 0.0 <= now - self.last < _FORGOTTEN_SECONDS


class RepairLog:
    """What was set back of one LLMDeployment. Memory only: after a restart all is set back at once.

    A change is told apart by the object and by what was changed by whom, as far as that can be told: a person who tries
    this and that is no machine that does the same for ever.
    """

    def __init__(self) -> None:
        self._repairs: dict[tuple[Ref, str], _Repairs] = {}

    def wait_seconds(self, ref: Ref, what: str, now: float) -> float:
        """How long the next repair of this change has to wait; 0 for none."""
        known = self._repairs.get((ref, what))
        return 0.0 if known is None else known.wait_seconds(now)

    def note(self, ref: Ref, what: str, now: float) -> None:
        """It was set back now."""
        self._repairs = {change: known for change, known in self._repairs.items() if not known.are_forgotten(now)}
        known = self._repairs.get((ref, what))
        self._repairs[ref, what] = _Repairs(times=1 if known is None else known.times + 1, last=now)

    def contests(self, now: float) -> str:
        """What comes back again and again, for people; empty where nothing does. Once or twice is a hand."""
        told = []
        for (ref, what), known in self._repairs.items():
            if known.times >= _AT_ONCE and not known.are_forgotten(now):
                whose = "its status" if ref == STATUS else str(ref)
                told.append(f"{whose} is repeatedly changed by another client and reverted: {what or _BY_A_TWIN}")
        return "; ".join(told)
