"""The variance of the arriving work, which determines the headroom.

Part of ``autoscaling.decide`` and of ``history``. Independent prompts and prompts in batches need the same number of
replicas on average but different headroom. The estimate remembers the square of each tick's work above the mean of the
minute before it, which decays by half in ten minutes. Work below the mean is ignored, so that more work never lowers
the demand. A ramp counts as variance while the mean follows it, which is harmless.
"""

import math
from dataclasses import dataclass

_MEAN_HALF_LIFE_SECONDS = 60.0
_HALF_LIFE_SECONDS = 600.0
_USUAL = 0.5
"""The assumed variance of the work of one tick per busy replica, until more is known."""
_USUAL_SECONDS = 600.0
"""The weight of the assumption, in seconds of observation."""
_LOOK_SECONDS = 15.0
"""Shorter ticks have a larger variance, in proportion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variance:
    """Decaying sums of work in busy replicas."""

    work: float = 0.0
    work_seconds: float = 0.0
    squares: float = 0.0
    """The squared excess over the earlier mean."""
    seconds: float = 0.0

    def seen(self, busy: float, *, seconds: float) -> "Variance":
        """Return the estimate after ``seconds`` more, in which work for ``busy`` replicas arrived."""
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
        """Return the standard deviation of one tick's work in busy replicas, if ``busy`` are busy."""
        # As much work lies below the mean as above it.
        squares = 2 * self.squares + _USUAL * busy * _USUAL_SECONDS
        return math.sqrt(squares / (self.seconds + _USUAL_SECONDS))
