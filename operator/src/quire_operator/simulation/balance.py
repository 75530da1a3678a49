"""Which replica a request goes to: the gateway's own rule, a function of values.

Under ``gateway``. This is ``quire_gateway.balance.pick`` for replicas that all answer (distributions do not import one
another; tests/contract holds the two together): the replica that has most of the prompt cached, if that makes nobody
wait and it has about its share of the load; else the least expected wait, counting what was sent since the scrape.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_FULL_KV = 0.95
_LEAST_SHARE = 0.25
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
_WAIT_GRAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Load:
    """What a replica said of itself at the last scrape, and how many requests it had from us then."""

    running: int
    waiting: int
    kv_usage: float
    finished_per_second: float | None
    in_flight: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica as the gateway sees it."""

    name: str
    in_flight: int = 0
    load: Load | None = None
    prefix_share: float = 0.0


def pick(candidates: Sequence[Candidate], draw: float) -> Candidate:
    """Out of one or more; ``draw`` in [0, 1) breaks ties."""
    costs = [_cost(candidate) for candidate in candidates]
    affine = _affine(candidates, costs)
    if affine is not None:
        return affine
    least = min(costs)
    best = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
    return best[int(draw * len(best))]


def _affine(candidates: Sequence[Candidate], costs: Sequence[tuple[int, float]]) -> Candidate | None:
    """The one with the longest match, if going there costs nobody anything."""
    if all(candidate.prefix_share < _LEAST_SHARE for candidate in candidates):
        return None
    places = range(len(candidates))
    best = max(places, key=lambda place: (candidates[place].prefix_share, *(-x for x in costs[place])))
    wait, load = costs[best]
    makes_wait = wait > min(wait for wait, _ in costs)
    is_busy = load >= _LOAD_BOUND * min(load for _, load in costs) + _LOAD_SLACK
    return None if makes_wait or is_busy else candidates[best]


def _cost(candidate: Candidate) -> tuple[int, float]:
    """Expected wait in grains, then the requests it works on, its KV use breaking ties."""
    load = candidate.load
    if load is None:
        return 0, float(candidate.in_flight)
    since = max(0, candidate.in_flight - load.in_flight)
    queued = load.waiting
    if load.waiting > 0 or load.kv_usage >= _FULL_KV:
        queued += since + 1
    wait = 0
    if queued:
        rate = load.finished_per_second
        seconds = (
            _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))
        )
        wait = round(queued * seconds / _WAIT_GRAIN_SECONDS)
    return wait, load.running + load.waiting + since + round(load.kv_usage, 1)
