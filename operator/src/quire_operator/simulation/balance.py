"""Which replica a request goes to: the gateway's own rule, a function of values.

Under ``gateway``. This is ``quire_gateway.balance.pick`` for replicas that all answer, and tell what they have left to
compute (distributions do not import one another; tests/contract holds the two together): the least expected time to
the first token, counting what was sent since the scrape, then the fewest requests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_UNKNOWN_SECONDS_PER_REQUEST = 1.0
_SLOWEST_SECONDS_PER_REQUEST = 60.0
_UNKNOWN_TOKENS_PER_SECOND = 1000.0
_FULL_KV = 0.95
_LOAD_BOUND, _LOAD_SLACK = 1.25, 2.0
_GRAIN_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready replica as the gateway sees it."""

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
    """Grains of time to the first token, then requests. A cached prefix counts where few are at work beside it."""
    known = [c.load.prefill_tokens_per_second for c in candidates if c.load.prefill_tokens_per_second is not None]
    typical = sum(known) / len(known) if known else _UNKNOWN_TOKENS_PER_SECOND
    requests = [_requests(candidate) for candidate in candidates]
    busy = _LOAD_BOUND * min(requests) + _LOAD_SLACK
    costs = []
    for candidate, count in zip(candidates, requests, strict=True):
        own = prompt_tokens * (1.0 - (candidate.prefix_share if count < busy else 0.0))
        costs.append((round(_first_token_seconds(candidate, own, typical) / _GRAIN_SECONDS), count))
    return costs


def _first_token_seconds(candidate: Candidate, own_tokens: float, typical_rate: float) -> float:
    load = candidate.load
    rate = load.prefill_tokens_per_second
    if rate is None:
        rate = typical_rate
    ahead = (load.pending_tokens + candidate.sent_tokens) / rate
    if load.kv_usage >= _FULL_KV or load.running >= load.max_running:
        ahead = max(ahead, (load.waiting + _since(candidate) + 1) * _seconds_per_request(load))
    return ahead + own_tokens / rate


def _seconds_per_request(load: Load) -> float:
    rate = load.finished_per_second
    return _UNKNOWN_SECONDS_PER_REQUEST if rate is None else min(_SLOWEST_SECONDS_PER_REQUEST, 1 / max(rate, 1e-9))


def _requests(candidate: Candidate) -> float:
    """What it works on, its KV use breaking ties."""
    load = candidate.load
    return load.running + load.waiting + _since(candidate) + round(load.kv_usage, 1)


def _since(candidate: Candidate) -> int:
    return max(0, candidate.in_flight - candidate.load.in_flight)
