"""What late first tokens teach of the work that replicas can take: a factor on it, remembered for a while.

Under ``autoscaler.decide``; part of ``history``. The late first tokens of the last half minute ask for one replica
more; when they end, so does that, and as soon as replicas may go the same number is tried that was too few before. So:
if clearly more were late over the last half hour than the percentile allows, and some are now though the work that came
should have fitted, work counts for more than was learnt of it. Half of that is let go each hour, to see whether it is
still so. Bursts that the percentile allows for, or that were seen to be more than fits, teach nothing.
"""

from dataclasses import dataclass, replace

_HALF_LIFE_SECONDS = 900.0
_ENOUGH_SECONDS = 1000.0
"""Watched, older ones faded: after half an hour, for how things begin is no measure of how they go on."""
_CLEARLY, _KNOWN = 1.5, 0.5
"""Times what the percentile allows: late ones enough to learn from, and to believe again what was let go of by half."""
_PEAK_HALF_LIFE_SECONDS = 120.0
_KEPT_SECONDS = 3600.0
_MOST = 3.0
_MOST_AT_ONCE = 1.5
_FAR_ENOUGH = 2.0
"""With so many times the replicas for the work, and so many more, late is for another reason."""
_QUEUED = 0.5
"""A replica: with more than that waiting, late is what had queued before replicas came, which tells nothing of now."""
_LEAST = 1.05
_BEYOND = 0.05
"""Replicas: so much more than there are is asked for, which makes it one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftCorrection:
    factor: float = 1.0
    replicas: int = 0
    """So many were too few when it was learnt."""
    learnt: float = 0.0
    """When."""
    reviewed: float = 0.0
    """When it was learnt, or last let go of by half."""
    first_tokens: float = 0.0
    late: float = 0.0
    watched_seconds: float = 0.0
    """Of the last half hour, older ones faded."""
    peak: float = 0.0
    """The most replicas that work, this factor included, asked for of late; faded."""

    def seen(self, *, first_tokens: float, late: float, seconds: float, now: float) -> "TtftCorrection":
        """After ``seconds`` more."""
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
        """Work, this factor included, asks for ``need`` replicas now."""
        fade = 0.5 ** (max(0.0, seconds) / _PEAK_HALF_LIFE_SECONDS)
        return replace(self, peak=max(need, self.peak * fade))

    def raised(self, *, replicas: int, waiting: float, percentile: int, now: float) -> "TtftCorrection":
        """First tokens are late though there are ``replicas``, all settled."""
        allowed = self.first_tokens * (100 - percentile) / 100
        misses = self.late > allowed * (_KNOWN if self.factor > 1.0 else _CLEARLY)
        near = 0 < self.peak <= replicas <= max(_FAR_ENOUGH * self.peak, self.peak + _FAR_ENOUGH)
        fits = near and waiting <= _QUEUED * replicas
        if not misses or not fits or self.watched_seconds < _ENOUGH_SECONDS:
            return self
        factor = min(_MOST, self.factor * min(_MOST_AT_ONCE, (replicas + _BEYOND) / self.peak))
        return replace(self, factor=factor, replicas=replicas, learnt=now, reviewed=now)
