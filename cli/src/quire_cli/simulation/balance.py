"""Which replica a request goes to: the gateway's own rule, a function of values.

Under ``gateway``. This is ``quire_gateway.balance.pick`` for replicas that all answer, and tell what they have left to
compute (distributions do not import one another; tests/contract holds the two together): the least expected time to
the first token, counting what was sent since the scrape, then the fewest requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_UNKNOWN_TOKENS_PER_SECOND = 1000.0
_FULL_KV = 0.95
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
_GRAIN_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Load:
    """What a replica said of itself at the last scrape, and how many requests it had from us then."""

    running: int
    waiting: int
    max_running: int
    kv_usage: float
    finished_per_second: float | None
    in_flight: int
    pending_tokens: float
    prefill_tokens_per_second: float | None

    @cached_property
    def requests(self) -> int:
        return self.running + self.waiting

    @cached_property
    def kv_tenths(self) -> float:
        """Breaks ties."""
        return round(self.kv_usage, 1)

    @cached_property
    def is_full(self) -> bool:
        """One has to end before another can begin."""
        return self.kv_usage >= _FULL_KV or self.running >= self.max_running

    @cached_property
    def seconds_per_request(self) -> float:
        rate = self.finished_per_second
        return _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))


class Candidate(NamedTuple):
    """A ready replica as the gateway sees it. A tuple, for each request makes as many as there are replicas."""

    name: str
    load: Load
    in_flight: int = 0
    sent_tokens: float = 0.0
    prefix_share: float = 0.0


def pick(candidates: Sequence[Candidate], prompt_tokens: float, draw: float) -> Candidate:
    """Out of one or more; ``draw`` in [0, 1) breaks ties."""
    if len(candidates) == 1:
        return candidates[0]
    costs = _costs(candidates, prompt_tokens)
    least = min(costs)
    best = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == least]
    return best[int(draw * len(best))]


def _costs(candidates: Sequence[Candidate], prompt_tokens: float) -> list[tuple[int, float]]:
    """Grains of time to the first token, then requests. A cached prefix counts where few are at work beside it.

    One loop without calls: a simulation spends a fifth of its time here.
    """
    known = [c.load.prefill_tokens_per_second for c in candidates if c.load.prefill_tokens_per_second is not None]
    typical = sum(known) / len(known) if known else _UNKNOWN_TOKENS_PER_SECOND
    requests = []
    for _, load, in_flight, _, _ in candidates:
        since = in_flight - load.in_flight
        requests.append(load.requests + (since if since > 0 else 0) + load.kv_tenths)
    busy = _LOAD_BOUND * min(requests) + _LOAD_SLACK
    costs = []
    for (_, load, in_flight, sent_tokens, prefix_share), count in zip(candidates, requests, strict=True):
        rate = load.prefill_tokens_per_second
        if rate is None:
            rate = typical
        own = prompt_tokens * (1.0 - prefix_share) if count < busy else prompt_tokens
        ahead = (load.pending_tokens + sent_tokens) / rate
        if load.is_full:
            since = max(0, in_flight - load.in_flight)
            ahead = max(ahead, (load.waiting + since + 1) * load.seconds_per_request)
        costs.append((round((ahead + own / rate) / _GRAIN_SECONDS), count))
    return costs
