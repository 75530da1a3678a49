"""Which replica a request goes to: ``pick(candidates, …) -> Picked | Hold``, a function of values.

Where the replicas report how many prompt tokens they have left to compute, the request goes to the one with the least
expected time to its first token: the prompt tokens ahead of it and its own that are not cached, divided by the speed at
which the replica computes them. Equal times are decided by the number of requests. So a cached prefix attracts a
request as long as the queue in front of it costs less than the prefix saves.

Where a replica does not report this (an engine of another kind), all replicas are compared by their requests: the
replica with the longest cached prefix if no request has to wait for it, else the one with the shortest expected queue.

The costs include what was sent since the last scrape, because a scrape that is a second old does not show a burst that
came after it. They also include the time in which a replica loads an adapter that the request needs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_UNKNOWN_TOKENS_PER_SECOND = 1000.0
_FULL_KV_USAGE = 0.95
"""A replica whose KV cache is fuller makes the next request wait, however short its queue is."""
_LEAST_SHARE = 0.25
"""The smallest cached share of a prompt that counts where replicas do not report prompt tokens: a shorter match saves
less than an even load does."""
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
"""A replica is chosen for its cache only while it has fewer requests than ``bound * fewest + slack``."""
_GRAIN_SECONDS = 0.05
"""Smaller differences in time are noise: then the replica with fewer requests is better."""

_Cost = tuple[int, float]
"""Time in grains, then requests."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load that a replica reported at its last scrape.

    Every request that is routed reads it, so derived figures are computed once and kept.
    """

    running: float
    waiting: float
    kv_usage: float
    """The used share of the KV cache, 0 to 1."""
    finished_per_second: float | None
    """None while too few requests finished to estimate it."""
    in_flight: int
    """The gateway's own requests that the replica had at the scrape."""
    max_running: float | None = None
    """None where the replica does not report it."""
    pending_tokens: float | None = None
    """Prompt tokens that the replica still has to compute; None where it does not report them."""
    prefill_tokens_per_second: float | None = None
    """None while the replica computed too few prompt tokens to estimate it."""

    @cached_property
    def is_full(self) -> bool:
        """True if a request has to end before another can start."""
        return self.kv_usage >= _FULL_KV_USAGE or (self.max_running is not None and self.running >= self.max_running)

    @cached_property
    def seconds_per_request(self) -> float:
        """The time between two requests that finish."""
        rate = self.finished_per_second
        return _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))

    @cached_property
    def requests(self) -> float:
        """Running and waiting requests."""
        return self.running + self.waiting

    @cached_property
    def kv_tenths(self) -> float:
        """The KV cache usage, rounded; it breaks ties between replicas with equally many requests."""
        return round(self.kv_usage, 1)


class Candidate(NamedTuple):
    """A replica as the routing policy sees it. A tuple, because each request builds one for every replica."""

    id: str
    load: Load | None
    """None while there is no recent scrape: then only the gateway's own requests count."""
    in_flight: int = 0
    """The gateway's own requests that the replica has now."""
    sent_tokens: float = 0.0
    """Prompt tokens that the gateway sent and that are probably not cached: those since the scrape, or, without a
    recent scrape, those in flight."""
    prefix_share: float = 0.0
    """The share of this prompt that the replica has probably cached."""
    ready: bool = True
    """True if discovery lists the replica as ready and not terminating."""
    suspect: bool = False
    """True if the replica recently failed to answer: it is used only if no other replica can be."""
    load_seconds: float = 0.0
    """The time in which the replica loads the adapter of the request; 0 if it has it, or if none is needed."""


@dataclass(frozen=True, slots=True)
class Hold:
    """The decision that no replica can serve the request now."""


@dataclass(frozen=True, slots=True)
class Picked:
    """The decision to send the request to a replica."""

    id: str


def pick(
    candidates: Sequence[Candidate],
    *,
    prompt_tokens: float = 0.0,
    exclude: Collection[str] = (),
    tie_breaker: float = 0.0,
) -> Picked | Hold:
    """Return the replica with the least cost among those that may be asked; ``tie_breaker`` is a number in [0, 1)."""
    able = [c for c in candidates if c.ready and c.id not in exclude]
    trusted = [c for c in able if not c.suspect] or able
    if not trusted:
        return Hold()
    if len(trusted) == 1:
        return Picked(trusted[0].id)
    if _report_tokens(trusted):
        costs = _first_token_costs(trusted, prompt_tokens)
    else:
        costs = [(round(expected_wait_seconds(c) / _GRAIN_SECONDS), _requests(c)) for c in trusted]
        affine = _affine(trusted, costs)
        if affine is not None:
            return Picked(affine)
    least = min(costs)
    best = [candidate.id for candidate, cost in zip(trusted, costs, strict=True) if cost == least]
    return Picked(best[int(tie_breaker * len(best))])


# --- by prompt tokens ---


def _report_tokens(candidates: Sequence[Candidate]) -> bool:
    """Return whether at least one replica was scraped and all that were report their prompt tokens."""
    loads = [c.load for c in candidates if c.load is not None]
    return bool(loads) and all(load.pending_tokens is not None for load in loads)


def _first_token_costs(candidates: Sequence[Candidate], prompt_tokens: float) -> list[_Cost]:
    typical = _typical_rate(candidates)
    requests = [_requests(candidate) for candidate in candidates]
    busy = _LOAD_BOUND * min(requests) + _LOAD_SLACK
    costs = []
    for candidate, count in zip(candidates, requests, strict=True):
        own_tokens = prompt_tokens * (1.0 - candidate.prefix_share) if count < busy else prompt_tokens
        seconds = first_token_seconds(candidate, own_tokens=own_tokens, typical_rate=typical)
        costs.append((round(seconds / _GRAIN_SECONDS), count))
    return costs


def _typical_rate(candidates: Sequence[Candidate]) -> float:
    rates = [c.load.prefill_tokens_per_second for c in candidates if c.load is not None]
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else _UNKNOWN_TOKENS_PER_SECOND


def first_token_seconds(candidate: Candidate, *, own_tokens: float, typical_rate: float) -> float:
    """Return the expected time to the first token of a prompt with so many tokens that are not cached.

    A replica whose speed is not known counts as a typical one.
    """
    load = candidate.load
    if load is None:
        return candidate.load_seconds + (candidate.sent_tokens + own_tokens) / typical_rate
    rate = load.prefill_tokens_per_second
    if rate is None:
        rate = typical_rate
    ahead = ((load.pending_tokens or 0.0) + candidate.sent_tokens) / rate
    if load.is_full:
        ahead = max(ahead, (load.waiting + _sent_since_scrape(candidate, load) + 1) * load.seconds_per_request)
    return candidate.load_seconds + ahead + own_tokens / rate


# --- by requests ---


def _affine(candidates: Sequence[Candidate], costs: Sequence[_Cost]) -> str | None:
    """Return the replica with the longest cached prefix, unless it would make requests wait or is too busy."""
    by_id: Mapping[str, _Cost] = {c.id: cost for c, cost in zip(candidates, costs, strict=True)}
    best = max(candidates, key=lambda c: (c.prefix_share, *(-x for x in by_id[c.id])))
    if best.prefix_share < _LEAST_SHARE:
        return None
    wait, requests = by_id[best.id]
    makes_wait = wait > min(wait for wait, _ in costs)
    is_busy = requests >= _LOAD_BOUND * min(requests for _, requests in costs) + _LOAD_SLACK
    return None if makes_wait or is_busy else best.id


def expected_wait_seconds(candidate: Candidate) -> float:
    """Return how long a new request would queue before its first step."""
    load = candidate.load
    if load is None:
        return candidate.load_seconds
    queued = load.waiting
    if load.waiting > 0 or load.kv_usage >= _FULL_KV_USAGE:
        # The replica has no room: what was sent since the scrape is queued too, and this request will be.
        queued += _sent_since_scrape(candidate, load) + 1
    return candidate.load_seconds + queued * load.seconds_per_request


# --- by both ---


def _requests(candidate: Candidate) -> float:
    """Return the requests that the replica has; its KV cache usage breaks ties."""
    load = candidate.load
    if load is None:
        return float(candidate.in_flight)
    return load.requests + _sent_since_scrape(candidate, load) + load.kv_tenths


def _sent_since_scrape(candidate: Candidate, load: Load) -> int:
    """Return how many of the gateway's own requests the replica got since the scrape."""
    since = candidate.in_flight - load.in_flight
    return since if since > 0 else 0
