"""Which replica a request goes to: ``pick(candidates, exclude, draw) -> Picked | Hold``, a function of values.

Called by ``fleet`` for every attempt. First the replica that probably holds most of the prompt in its prefix cache, as
long as that makes nobody wait and it has about its share of the load. Else the least expected wait: the queue ahead
divided by how fast the replica finishes requests, then the number it works on. What was sent since the last scrape
counts too, for a scrape a second old knows nothing of the burst that came after it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_FULL_KV = 0.95
"""A replica whose KV cache is fuller makes the next request wait, whatever its queue."""
_LEAST_SHARE = 0.25
"""Of a prompt: a shorter match saves less than an even load does."""
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
"""A replica chosen for its cache has at most so many times the least load there is, and so many requests more."""
_WAIT_GRAIN_SECONDS = 0.05
"""Differences in wait below this are noise: then the emptier replica is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a replica said of itself at its last scrape."""

    running: float
    waiting: float
    kv_usage: float
    """0 to 1."""
    finished_per_second: float | None
    """None while too few finished to tell."""
    in_flight: int
    """How many of our own requests it had when it said so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A replica, as the balancer sees it."""

    id: str
    ready: bool
    """In discovery: ready and not terminating."""
    suspect: bool
    """Did not answer lately: to be asked only if nobody else can be."""
    in_flight: int
    """Our own requests that it has now."""
    load: Load | None
    """None while it was not scraped, or not lately: then only our own requests count."""
    prefix_share: float = 0.0
    """Of this prompt: how much it has probably cached."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No replica can take the request now; one may come."""


@dataclass(frozen=True, slots=True)
class Picked:
    id: str


def pick(candidates: Sequence[Candidate], *, exclude: Collection[str] = (), draw: float = 0.0) -> Picked | Hold:
    """The replica with the least expected wait among those that may be asked; ``draw`` in [0, 1) breaks ties."""
    able = [c for c in candidates if c.ready and c.id not in exclude]
    trusted = [c for c in able if not c.suspect] or able
    if not trusted:
        return Hold()
    costs = {c.id: _cost(c) for c in trusted}
    affine = _affine(trusted, costs)
    if affine is not None:
        return Picked(affine)
    least = min(costs.values())
    best = [c.id for c in trusted if costs[c.id] == least]
    return Picked(best[int(draw * len(best))])


def _affine(candidates: Sequence[Candidate], costs: Mapping[str, tuple[int, float]]) -> str | None:
    """The replica with the longest match, if going there costs nobody anything."""
    best = max(candidates, key=lambda c: (c.prefix_share, *(-x for x in costs[c.id])))
    if best.prefix_share < _LEAST_SHARE:
        return None
    wait, load = costs[best.id]
    makes_wait = wait > min(wait for wait, _ in costs.values())
    is_busy = load >= _LOAD_BOUND * min(load for _, load in costs.values()) + _LOAD_SLACK
    return None if makes_wait or is_busy else best.id


def expected_wait_seconds(candidate: Candidate) -> float:
    """How long a new request would queue before its first step."""
    load = candidate.load
    if load is None:
        return 0.0
    since = max(0, candidate.in_flight - load.in_flight)
    queued = load.waiting
    if load.waiting > 0 or load.kv_usage >= _FULL_KV:
        # It has no room: what was sent since has queued up too, and so will this one.
        queued += since + 1
    rate = load.finished_per_second
    per_request = (
        _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))
    )
    return queued * per_request


def _cost(candidate: Candidate) -> tuple[int, float]:
    """Wait first, then the requests it works on, its KV use breaking ties among equals."""
    load = candidate.load
    wait = round(expected_wait_seconds(candidate) / _WAIT_GRAIN_SECONDS)
    if load is None:
        return wait, float(candidate.in_flight)
    since = max(0, candidate.in_flight - load.in_flight)
    return wait, load.running + load.waiting + since + round(load.kv_usage, 1)
