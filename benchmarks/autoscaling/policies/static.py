"""References that no autoscaler can reach: a number chosen in hindsight, and perfect knowledge of all load so far.

*Oracle*: the fewest replicas, fixed, that meet a target on the scored part. It knows the future, and it never scales.

*Reactive bound*: each second it knows all requests so far and the cost of each, and that the maximum demand needs as
many replicas as hindsight static has. In that proportion, plus a quarter and one more, it requests at once what was
needed so far, and never removes a replica. A policy that never holds more than demand has required so far cannot do
better: it learns later, and holds fewer. If even this is late too often, the start-up is longer than the ramp, and the
row is marked infeasible, unless some policy shows that it is not.
"""

import math
from collections.abc import Sequence

from quire_cli.simulation.fleet import Scaling
from quire_cli.simulation.results import LATE_SECONDS
from quire_cli.simulation.traces import Request
from quire_operator.domain.autoscaling.observation import Observation

_HEADROOM = 1.25
_SPARE = 1
_LOOK_BACK_SECONDS = 900


class StaticScaler:
    """A scaler that requests nothing."""

    period_seconds = 60.0
    scrape_seconds = 0.0

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def decide(self, observation: Observation, now: float) -> Scaling:
        return Scaling(replicas=self._replicas)


def needed_so_far(work: Sequence[float]) -> list[float]:
    """Return, by second, the maximum replicas that any interval up to then kept busy, with ``LATE_SECONDS`` allowed.

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
    """The reactive bound for the simulator's protocol; it reads the requests themselves."""

    period_seconds = 1.0
    scrape_seconds = 60.0

    def __init__(self, requests: Sequence[Request], costs: Sequence[float], *, static: int, maximum: int) -> None:
        """Create the bound. ``costs`` are busy seconds by request, ``static`` the replicas of hindsight static."""
        work = [0.0] * (int(requests[-1].time) + 1)
        for request, cost in zip(requests, costs, strict=True):
            work[int(request.time)] += cost
        needs = needed_so_far(work)
        most = max(needs[-1], 1e-9)
        self._needs = [need / most * static for need in needs]
        self._maximum = maximum

    def decide(self, observation: Observation, now: float) -> Scaling:
        # The requests of the second that has just ended are known.
        known = min(int(now) - 1, len(self._needs) - 1)
        need = self._needs[known] if known >= 0 else 0.0
        asked = len(observation.replicas) if observation.target is None else observation.target
        wanted = math.ceil(need * _HEADROOM) + _SPARE
        return Scaling(replicas=max(asked, min(wanted, self._maximum)))
