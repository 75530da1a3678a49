"""The ramp estimator: how far work rises above the planned level while a replica starts.

Part of ``autoscaling.decide`` and of ``history``. A replica that is ready now was requested one start-up time ago, for
the largest work seen until then within ``scaleDown.window``. Work above that level has no replica that was requested
for it. The estimator measures this excess over the horizon of the replicas' own start-up time and remembers its square,
which decays by half in twenty minutes. Bursts that recur within the window exceed nothing, however slowly replicas
start; a daily ramp does.
"""

import math
from dataclasses import dataclass, replace

_HALF_LIFE_SECONDS = 1200.0
_USUAL = 0.1
"""The assumed variance of the rise per busy replica over two minutes, until more is known. It is proportional to time,
as in a random walk.
"""
_USUAL_OVER_SECONDS = 120.0
_USUAL_SECONDS = 600.0
"""The weight of the assumption, in seconds of observation."""
_LOOK_SECONDS = 15.0
"""The delay of a tick: changes since the last tick are seen only at the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Work in busy replicas, as the mean of the last minute."""

    time: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RampEstimator:
    """Decaying sums of squared excess work in busy replicas, and the recent levels of work."""

    squares: float = 0.0
    seconds: float = 0.0
    levels: tuple[Level, ...] = ()
    """The oldest first."""

    def seen(self, busy: float, *, seconds: float, start_up: float, window: float, now: float) -> "RampEstimator":
        """Return the estimator after ``seconds`` more, at the end of which work for ``busy`` replicas arrives."""
        planned = now - start_up - _LOOK_SECONDS
        levels = (*(level for level in self.levels if level.time >= planned - window), Level(time=now, busy=busy))
        known = [level.busy for level in levels if level.time <= planned]
        if not known:
            return replace(self, levels=levels)
        above = max(0.0, busy - max(known))
        fade = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        return RampEstimator(
            squares=self.squares * fade + above * above * seconds, seconds=self.seconds * fade + seconds, levels=levels
        )

    def deviation(self, busy: float, *, start_up: float) -> float:
        """Return how far work rises while a replica starts, in busy replicas, if ``busy`` are busy."""
        usual = _USUAL * busy * (start_up + _LOOK_SECONDS) / _USUAL_OVER_SECONDS
        return math.sqrt((self.squares + usual * _USUAL_SECONDS) / (self.seconds + _USUAL_SECONDS))
