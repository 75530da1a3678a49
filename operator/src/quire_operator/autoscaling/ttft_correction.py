"""The TTFT correction: a factor on the work, learned from late first tokens and remembered for a while.

Part of ``autoscaling.decide`` and of ``history``. Late first tokens in the last half minute require one more replica.
When they end, that need ends too, and the number that was too small would be tried again as soon as replicas may be
removed. So the factor rises if two things hold: clearly more first tokens than the percentile allows were late in the
last half hour, and some are late now although the arrived work should fit. Half of the correction is dropped each hour
to test whether it is still needed. Bursts that the percentile allows, or that visibly exceeded the replicas, teach
nothing.
"""

from dataclasses import dataclass, replace

_HALF_LIFE_SECONDS = 900.0
_ENOUGH_SECONDS = 1000.0
"""The observed time from which the factor may rise, with older time decayed: half an hour, because a start is not
typical.
"""
_CLEARLY, _KNOWN = 1.5, 0.5
"""Multiples of the late tokens that the percentile allows: to learn a correction, and to confirm a halved one."""
_PEAK_HALF_LIFE_SECONDS = 120.0
_KEPT_SECONDS = 3600.0
_MOST = 3.0
_MOST_AT_ONCE = 1.5
_FAR_ENOUGH = 2.0
"""With this many times the replicas for the work, and this many more, first tokens are late for another reason."""
_QUEUED = 0.5
"""Waiting requests per replica. With more, first tokens are late because of an earlier queue."""
_LEAST = 1.05
_BEYOND = 0.05
"""The replicas beyond the current number that are required, which round up to one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftCorrection:
    factor: float = 1.0
    replicas: int = 0
    """The number of replicas that was too small when the factor was learned."""
    learnt: float = 0.0
    """The time at which the factor was learned."""
    reviewed: float = 0.0
    """The time at which the factor was learned or last halved."""
    first_tokens: float = 0.0
    late: float = 0.0
    watched_seconds: float = 0.0
    """The decaying sum of observed time in the last half hour."""
    peak: float = 0.0
    """The decaying maximum of the replicas that the work required recently, including this factor."""

    def seen(self, *, first_tokens: float, late: float, seconds: float, now: float) -> "TtftCorrection":
        """Return the correction after ``seconds`` more."""
        fade = 0.5 ** (max(0.0, seconds) / _HALF_LIFE_SECONDS)
        kept = replace(
            self,
            first_tokens=self.first_tokens * fade + first_tokens,
            late=self.late * fade + late,
            watched_seconds=self.watched_seconds * fade + seconds,
        )
        if kept.factor <= 1.0 or 0 <= now - self.reviewed < _KEPT_SECONDS:
            return kept
        factor = 1.0 + (self.factor - 1.0) / 2
        return replace(kept, factor=factor if factor >= _LEAST else 1.0, reviewed=now)

    def needed(self, need: float, *, seconds: float) -> "TtftCorrection":
        """Return the correction after work, including this factor, requires ``need`` replicas."""
        fade = 0.5 ** (max(0.0, seconds) / _PEAK_HALF_LIFE_SECONDS)
        return replace(self, peak=max(need, self.peak * fade))

    def raised(self, *, replicas: int, waiting: float, percentile: int, now: float) -> "TtftCorrection":
        """Return the correction, raised if first tokens are late although ``replicas`` should be enough."""
        allowed = self.first_tokens * (100 - percentile) / 100
        misses = self.late > allowed * (_KNOWN if self.factor > 1.0 else _CLEARLY)
        near = 0 < self.peak <= replicas <= max(_FAR_ENOUGH * self.peak, self.peak + _FAR_ENOUGH)
        fits = near and waiting <= _QUEUED * replicas
        if not misses or not fits or self.watched_seconds < _ENOUGH_SECONDS:
            return self
        factor = min(_MOST, self.factor * min(_MOST_AT_ONCE, (replicas + _BEYOND) / self.peak))
        return replace(self, factor=factor, replicas=replicas, learnt=now, reviewed=now)
