"""Which replica a request goes to: ``pick(candidates, prompt_tokens, exclude, draw) -> Picked | Hold``, a function of
values.

Called by ``fleet`` for every attempt. Where the replicas tell what they have left to compute, the least expected time
to the first token: the prompt tokens ahead of it and its own that are not cached, by how fast the replica computes
them; then the fewest requests. So a prefix that is cached draws a request, as long as the way to it is not longer than
what it saves. Where a replica does not tell (an engine of another kind), all are compared by their requests: affinity
that makes nobody wait, else the least expected queue. What was sent since the last scrape counts too, for a scrape a
second old knows nothing of the burst that came after it.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_UNKNOWN_TOKENS_PER_SECOND = 1000.0
_FULL_KV = 0.95
"""A replica whose KV cache is fuller makes the next request wait, whatever its queue."""
_LEAST_SHARE = 0.25
"""Of a prompt: a shorter match saves less than an even load does. Only where nobody tells what a match saves."""
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
"""A replica chosen for its cache has at most so many times the fewest requests there are, and so many more."""
_GRAIN_SECONDS = 0.05
"""Differences in time below this are noise: then the emptier replica is better."""

_Cost = tuple[int, float]
"""Time in grains, then requests."""


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
    max_running: float | None = None
    """None where it does not say."""
    pending_tokens: float | None = None
    """Prompt tokens that it has still to compute; None where it does not say."""
    prefill_tokens_per_second: float | None = None
    """None while it computed too few to tell."""


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
    sent_tokens: float = 0.0
    """Of our own prompts, what is probably not cached: those sent since the scrape, or, without one, those it has."""
    prefix_share: float = 0.0
    """Of this prompt: how much it has probably cached."""


@dataclass(frozen=True, slots=True)
class Hold:
    """No replica can take the request now; one may come."""


@dataclass(frozen=True, slots=True)
class Picked:
    id: str


def pick(
    candidates: Sequence[Candidate],
    *,
    prompt_tokens: float = 0.0,
    exclude: Collection[str] = (),
    draw: float = 0.0,
) -> Picked | Hold:
    """The replica with the least cost among those that may be asked; ``draw`` in [0, 1) breaks ties."""
    able = [c for c in candidates if c.ready and c.id not in exclude]
    trusted = [c for c in able if not c.suspect] or able
    if not trusted:
        return Hold()
    if len(trusted) == 1:
        return Picked(trusted[0].id)
    if _tell_tokens(trusted):
        costs = _first_token_costs(trusted, prompt_tokens)
    else:
        costs = {c.id: (round(expected_wait_seconds(c) / _GRAIN_SECONDS), _requests(c)) for c in trusted}
        affine = _affine(trusted, costs)
        if affine is not None:
            return Picked(affine)
    least = min(costs.values())
    best = [c.id for c in trusted if costs[c.id] == least]
    return Picked(best[int(draw * len(best))])


# --- by prompt tokens ---


def _tell_tokens(candidates: Sequence[Candidate]) -> bool:
    """One does at least, and nobody that was scraped does not."""
    loads = [c.load for c in candidates if c.load is not None]
    return bool(loads) and all(load.pending_tokens is not None for load in loads)


def _first_token_costs(candidates: Sequence[Candidate], prompt_tokens: float) -> dict[str, _Cost]:
    typical = _typical_rate(candidates)
    requests = [_requests(candidate) for candidate in candidates]
    busy = _LOAD_BOUND * min(requests) + _LOAD_SLACK
    costs: dict[str, _Cost] = {}
    for candidate, count in zip(candidates, requests, strict=True):
        share = candidate.prefix_share if count < busy else 0.0
        seconds = first_token_seconds(candidate, own_tokens=prompt_tokens * (1.0 - share), typical_rate=typical)
        costs[candidate.id] = round(seconds / _GRAIN_SECONDS), count
    return costs


def _typical_rate(candidates: Sequence[Candidate]) -> float:
    loads = [c.load for c in candidates if c.load is not None]
    known = [load.prefill_tokens_per_second for load in loads if load.prefill_tokens_per_second is not None]
    return sum(known) / len(known) if known else _UNKNOWN_TOKENS_PER_SECOND


def first_token_seconds(candidate: Candidate, *, own_tokens: float, typical_rate: float) -> float:
    """How long after it was sent a prompt that lacks so many tokens probably has its first token. A replica whose
    speed is not known is taken for a typical one."""
    load = candidate.load
    if load is None:
        return (candidate.sent_tokens + own_tokens) / typical_rate
    rate = load.prefill_tokens_per_second
    if rate is None:
        rate = typical_rate
    ahead = ((load.pending_tokens or 0.0) + candidate.sent_tokens) / rate
    if _is_full(load):
        ahead = max(ahead, (load.waiting + _since(candidate) + 1) * _seconds_per_request(load))
    return ahead + own_tokens / rate


def _is_full(load: Load) -> bool:
    """One has to end before another can begin."""
    return load.kv_usage >= _FULL_KV or (load.max_running is not None and load.running >= load.max_running)


# --- by requests ---


def _affine(candidates: Sequence[Candidate], costs: Mapping[str, _Cost]) -> str | None:
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
    queued = load.waiting
    if load.waiting > 0 or load.kv_usage >= _FULL_KV:
        # It has no room: what was sent since has queued up too, and so will this one.
        queued += _since(candidate) + 1
    return queued * _seconds_per_request(load)


# --- by both ---


def _seconds_per_request(load: Load) -> float:
    rate = load.finished_per_second
    return _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))


def _requests(candidate: Candidate) -> float:
    """What it works on, its KV use breaking ties among equals."""
    load = candidate.load
    if load is None:
        return float(candidate.in_flight)
    return load.running + load.waiting + _since(candidate) + round(load.kv_usage, 1)


def _since(candidate: Candidate) -> int:
    """Requests of ours that it got since its last scrape."""
    return 0 if candidate.load is None else max(0, candidate.in_flight - candidate.load.in_flight)
