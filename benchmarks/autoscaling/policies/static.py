"""References that no autoscaler can be: a fixed number chosen in hindsight, and perfect knowledge of all load so far.

*Oracle*: the fewest replicas, fixed, that meet a target on the scored part. It knows the future, and it never scales.

*Reactive bound*: at each second it knows all requests that came so far and what each costs, and that the most that was
ever needed takes as many replicas as hindsight static has; in that proportion, and a quarter and one more, it asks at
once for what was needed so far, and never removes one. A policy that never holds more than demand has called for so far
can't do better: it learns later, and holds fewer. Where even this is late too often, the start-up is longer than the
ramp, and the row is named infeasible, unless some policy shows that it is not.
"""

import math
from collections.abc import Sequence

from quire_cli.simulation.run import LATE_SECONDS
from quire_cli.simulation.scaler import Scaling
from quire_cli.simulation.scenario import Request
from quire_operator.domain.autoscaling.observation import Observation

_HEADROOM = 1.25
_SPARE = 1
_LOOK_BACK_SECONDS = 900


class StaticScaler:
    """Asks for nothing."""

    period_seconds = 60.0
    scrape_seconds = 0.0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def decide(self, observation: Observation, now: float) -> Scaling:
        return Scaling(replicas=self._replicas)


def needed_so_far(work: Sequence[float]) -> list[float]:
    """Return by second the most replicas that any stretch of seconds up to then kept busy, ``LATE_SECONDS`` being
    allowed.

    ``work[t]`` is the seconds of a busy replica that arrive in second t. Work that arrives from a to t is done in time
    by n replicas only if it is at most n · (t − a + LATE_SECONDS).
    """
    most, needs = 0.0, []
    for at in range(len(work)):
        total = 0.0
        for back in range(min(at + 1, _LOOK_BACK_SECONDS)):
            total += work[at - back]
            most = max(most, total / (back + 1 + LATE_SECONDS))
        needs.append(most)
    return needs


class ReactiveBound:
    """Behind the simulator's protocol, but looking at the requests themselves."""

    period_seconds = 1.0
    scrape_seconds = 60.0

    def __init__(self, requests: Sequence[Request], costs: Sequence[float], *, static: int, maximum: int) -> None:
        """``costs``: by request, seconds of a busy replica. ``static``: replicas of hindsight static."""
        work = [0.0] * (int(requests[-1].time) + 1)
        for request, cost in zip(requests, costs, strict=True):
            work[int(request.time)] += cost
        needs = needed_so_far(work)
        most = max(needs[-1], 1e-9)
        self._needs = [need / most * static for need in needs]
        self._maximum = maximum

    def decide(self, observation: Observation, now: float) -> Scaling:
        # What came within the second that has just ended is known.
        known = min(int(now) - 1, len(self._needs) - 1)
        need = self._needs[known] if known >= 0 else 0.0
        asked = len(observation.replicas) if observation.target is None else observation.target
        wanted = math.ceil(need * _HEADROOM) + _SPARE
        return Scaling(replicas=max(asked, min(wanted, self._maximum)))
