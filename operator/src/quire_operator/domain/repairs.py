"""How soon what others changed is set back: at once, and ever more slowly where it comes back again and again.

Used by ``reconcile`` for each object it writes. Without it two controllers of one field, or two operators that were
started by mistake with Leases of different names, would write as fast as their watches tell.
"""

from dataclasses import dataclass, replace

_AT_ONCE = 3
_MAX_SECONDS = 600.0
_FORGOTTEN_SECONDS = 2 * _MAX_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Repairs:
    """Those of one object, of late."""

    times: int = 0
    last: float = 0.0
    what: str = ""
    """What was changed by whom, at the last one."""

    def wait_seconds(self, now: float) -> float:
        """How long the next one has to wait; 0 for none."""
        if self._are_forgotten(now) or self.times < _AT_ONCE:
            return 0.0
        pause = min(_MAX_SECONDS, 2.0 ** (self.times - _AT_ONCE + 1))
        return max(0.0, self.last + pause - now)

    def one_more(self, now: float, what: str) -> "Repairs":
        """It was set back now."""
        times = 1 if self._are_forgotten(now) else self.times + 1
        return replace(self, times=times, last=now, what=what)

    def is_contest(self, now: float) -> bool:
        """Once or twice is a hand; more is a machine that will not stop."""
        return self.times >= _AT_ONCE and not self._are_forgotten(now)

    def _are_forgotten(self, now: float) -> bool:
        # A clock that was set back must not make the wait longer than it can be.
        return not 0.0 <= now - self.last < _FORGOTTEN_SECONDS
