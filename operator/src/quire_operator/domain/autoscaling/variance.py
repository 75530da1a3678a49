"""How much arriving work varies: what spare replicas are for.

Under ``autoscaler.decide``; part of ``history``. Prompts drawn one by one and prompts sent by the dozen need the same
replicas on average, and not the same ones to spare. So the work of each look that is above the mean of the minute
before is remembered by its square, half of which has faded after ten minutes. Work below the mean is not: more of it
never lowers what is asked for. A ramp counts as variation while the mean follows it, which is as well.
"""

import math
from dataclasses import dataclass

_MEAN_HALF_LIFE_SECONDS = 60.0
_HALF_LIFE_SECONDS = 600.0
_USUAL = 0.5
"""Variance of the work of one look, a busy replica: what is assumed until more is known."""
_USUAL_SECONDS = 600.0
"""For how much watching that counts."""
_LOOK_SECONDS = 15.0
"""Shorter looks vary more by themselves, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variance:
    """Faded sums, of work in busy replicas."""

    work: float = 0.0
    work_seconds: float = 0.0
    squares: float = 0.0
    """Of what was above the mean of before."""
    seconds: float = 0.0

    def seen(self, busy: float, *, seconds: float) -> "Variance":
        """After ``seconds`` more, in which ``busy`` replicas' work arrived per second."""
        above = max(0.0, busy - self.work / self.work_seconds) if self.work_seconds > 0 else 0.0
        share = min(1.0, seconds / _LOOK_SECONDS)
        fade, mean_fade = (0.5 ** (seconds / half) for half in (_HALF_LIFE_SECONDS, _MEAN_HALF_LIFE_SECONDS))
        return Variance(
            work=self.work * mean_fade + busy * seconds,
            work_seconds=self.work_seconds * mean_fade + seconds,
            squares=self.squares * fade + above * above * share * seconds,
            seconds=self.seconds * fade + seconds,
        )

    def deviation(self, busy: float) -> float:
        """By how many busy replicas the work of one look deviates from its mean, while ``busy`` are busy."""
        # As much lies below the mean as above it.
        squares = 2 * self.squares + _USUAL * busy * _USUAL_SECONDS
        return math.sqrt(squares / (self.seconds + _USUAL_SECONDS))
