"""The routing policy: which replica a request goes to. The gateway runs it, and so does the simulator. Pure."""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

_RATE_SECONDS = 10.0
_LEAST_TOKENS = 256
"""Fewer tokens between two readings may be a step that was counted in part."""
_HALF_LIFE_SECONDS = 10.0


class Rate:
    """A counter's growth per second over the last ten seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def update(self, value: float, now: float) -> float | None:
        """Return the rate including this reading; None before a second reading, or when nothing grew.

        A counter that fell belongs to a new process, so its history starts again.
        """
        if self._points and value < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, value))
        while len(self._points) > 2 and self._points[0][0] < now - _RATE_SECONDS:
            self._points.popleft()
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None


class PrefillRate:
    """The prompt tokens that a replica computes per second of steps that compute prompts.

    The mean is over tokens, not over time: seconds in which a replica only decodes do not show how fast a prompt
    would be.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._tokens = self._weighted = 0.0

    def update(self, computed: float, busy_seconds: float) -> float | None:
        """Return the rate including this reading of both counters; None while nothing is known."""
        tokens, took = (0.0, 0.0) if self._last is None else (computed - self._last[0], busy_seconds - self._last[1])
        self._last = computed, busy_seconds
        if tokens >= _LEAST_TOKENS and took > 0:
            fade = 0.5 ** (took / _HALF_LIFE_SECONDS)
            self._tokens = self._tokens * fade + tokens
            self._weighted = self._weighted * fade + tokens * (tokens / took)
        return self._weighted / self._tokens if self._tokens else None


_MAX_ENTRIES = 32_768
_MAX_TOTAL_ENTRIES = 131_072
"""About 20 MB. One model's full index has 5 MB; the indexes of all models in a cluster could exceed a pod's memory."""
_MAX_HOLDERS = 4
_CHECK_EVERY_BLOCKS = 1024
"""The number of recorded blocks after which the total size is checked again."""


class PrefixIndex:
    """The prefix index of one model.

    An entry counts only while its replica can still hold the block: a replica that was sent more tokens since then than
    its KV cache holds has evicted it. The least recently used entries are dropped when the index is full.
    """

    def __init__(
        self, *, max_entries: int = _MAX_ENTRIES, on_record: Callable[[int], None] = lambda count: None
    ) -> None:
        """Create an empty index; ``on_record`` is called with the number of blocks of each recorded prompt."""
        self._holders: dict[int, tuple[tuple[str, float], ...]] = {}
        """The replicas that hold a block, each with the total tokens that it had been sent by then."""
        self._sent: dict[str, float] = {}
        self._max_entries, self._on_record = max_entries, on_record

    def __len__(self) -> int:
        return len(self._holders)

    def shares(self, blocks: Sequence[int], capacities: Mapping[str, float]) -> Mapping[str, float]:
        """Return for each replica the share of these blocks that it probably holds, counted without a gap.

        ``capacities`` has the KV cache's tokens for every replica; infinite where they are not known.
        """
        found: dict[str, float] = {}
        leading = set(capacities)
        last: tuple[tuple[str, float], ...] | None = None
        for count, block in enumerate(blocks):
            holders = self._holders.get(block, ())
            # Most blocks were sent along with the one before, and have the same holders.
            if holders != last:
                last = holders
                holding = {id_ for id_, at in holders if id_ in leading and self._sent[id_] - at <= capacities[id_]}
                if count:
                    found.update(dict.fromkeys(leading - holding, count / len(blocks)))
                leading = holding
                if not leading:
                    break
        if blocks:
            found.update(dict.fromkeys(leading, 1.0))
        return found

    def record(self, blocks: Sequence[int], id_: str, tokens: float) -> None:
        """Record that this replica now works on a prompt of these blocks and so many tokens."""
        holder = id_, self._sent.get(id_, 0.0) + tokens
        self._sent[id_] = holder[1]
        # In reverse, so that a prompt's beginning, which other prompts may share, is dropped last.
        for block in reversed(blocks):
            others = [other for other in self._holders.pop(block, ()) if other[0] != id_]
            self._holders[block] = (holder, *others)[:_MAX_HOLDERS]
        if len(self._holders) > self._max_entries:
            self.shrink(self._max_entries)
        self._on_record(len(blocks))

    def shrink(self, max_entries: int) -> None:
        """Drop the least recently used entries above ``max_entries``."""
        # Listed once: finding a dict's first key passes over the slots of all keys deleted before it.
        for block in list(islice(self._holders, max(0, len(self._holders) - max_entries))):
            del self._holders[block]

    def forget(self, ids: Collection[str]) -> None:
        """Drop replicas that are gone: a new replica of the same name starts with an empty cache."""
        gone = self._sent.keys() & set(ids)
        for id_ in gone:
            del self._sent[id_]
        if gone:
            for block, holders in self._holders.items():
                self._holders[block] = tuple(holder for holder in holders if holder[0] not in gone)


class PrefixIndexes:
    """The prefix indexes of all models, bounded together: the largest indexes shrink until the total fits."""

    def __init__(self, *, max_entries: int = _MAX_TOTAL_ENTRIES) -> None:
        self._indexes: set[PrefixIndex] = set()
        self._max_entries = max_entries
        self._recorded = 0

    def open(self) -> PrefixIndex:
        """Create the index of one more model."""
        index = PrefixIndex(on_record=self._count)
        self._indexes.add(index)
        return index

    def close(self, index: PrefixIndex) -> None:
        """Drop the index of a model that is gone."""
        self._indexes.discard(index)

    def _count(self, blocks: int) -> None:
        self._recorded += blocks
        if self._recorded >= _CHECK_EVERY_BLOCKS:
            self._recorded = 0
            self._shrink()

    def _shrink(self) -> None:
        """Reduce the largest indexes to one size: what smaller indexes leave free is shared by the larger ones."""
        free = self._max_entries
        if sum(map(len, self._indexes)) <= free:
            return
        by_size = sorted(self._indexes, key=len)
        for place, index in enumerate(by_size):
            share = free // (len(by_size) - place)
            index.shrink(share)
            free -= len(index)


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
