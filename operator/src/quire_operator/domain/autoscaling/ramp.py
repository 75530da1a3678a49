"""How far work rises above what was planned for while a replica starts: what else spare replicas are for.

Under ``autoscaler.decide``; part of ``history``. A replica that is ready now was asked for a start-up ago, for the most
work that was seen by then, as far back as ``scaleDown.window`` keeps what it asked for. Work above that found nobody
who had been sent for. So that is what is measured, on the horizon of the replicas' own start-up, and remembered by its
square, half of which has faded after twenty minutes. Bursts that come again within the window rise above nothing,
however slowly replicas start; a morning does.
"""

import math
from dataclasses import dataclass, replace

_HALF_LIFE_SECONDS = 1200.0
_USUAL = 0.1
"""Variance of the rise, a busy replica, over two minutes: what is assumed until more is known. It is in proportion to
the time, as if work went up and down by chance."""
_USUAL_OVER_SECONDS = 120.0
_USUAL_SECONDS = 600.0
"""For how much watching that counts."""
_LOOK_SECONDS = 15.0
"""What happened since the last look is seen only at the next."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Work in busy replicas, the mean of the last minute."""

    time: float
    busy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RampEstimator:
    """Faded sums, of work in busy replicas, and the levels that what comes next is compared with."""

    squares: float = 0.0
    seconds: float = 0.0
    levels: tuple[Level, ...] = ()
    """Oldest first."""

    def seen(self, busy: float, *, seconds: float, start_up: float, window: float, now: float) -> "RampEstimator":
        """After ``seconds`` more, at the end of which ``busy`` replicas' work arrived per second."""
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
        """How far work rises while a replica starts, in busy replicas, while ``busy`` are busy."""
        usual = _USUAL * busy * (start_up + _LOOK_SECONDS) / _USUAL_OVER_SECONDS
        return math.sqrt((self.squares + usual * _USUAL_SECONDS) / (self.seconds + _USUAL_SECONDS))
