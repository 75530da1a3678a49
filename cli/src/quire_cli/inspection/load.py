"""The load of replicas for ``quire top``: readings of their metrics become figures over a few seconds. Pure.

The sources poll (``Fleet``); ``Loads`` keeps the last seconds and computes a sorted ``FleetLoad``. An unknown figure is
never 0 but None, and ``missing`` has the reason. Names are vLLM's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from quire_common.contract import engine as m
from quire_common.metrics_page import Point
from quire_operator.autoscaling.observation import Histogram
from quire_operator.kube.objects import Key

CACHE_QUERIES = "vllm:prefix_cache_queries_total"
PREEMPTIONS = "vllm:num_preemptions_total"
NAMES = frozenset(
    {
        m.WAITING,
        m.RUNNING,
        m.KV_USAGE,
        m.PROMPT_TOKENS,
        m.GENERATION_TOKENS,
        m.CACHE_HITS,
        CACHE_QUERIES,
        PREEMPTIONS,
        m.FIRST_TOKEN_TIME_BUCKET,
    }
)
"""The series that are read."""

_SECOND_POLL = "rates need a second poll"
_NO_FIRST_TOKEN = "no first tokens in this period"
_NO_PROMPT = "no prompts in this period"
_NOT_EXPORTED = "the engine does not export it"
_NO_ANSWER = "no replica answers"
_WITH_METRICS = frozenset({"Ready", "Draining"})
_COUNTERS = (m.PROMPT_TOKENS, m.GENERATION_TOKENS, m.CACHE_HITS, CACHE_QUERIES, PREEMPTIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One replica's metrics at one time; what it does not export is not among ``values``."""

    time: float
    values: Mapping[str, float]
    first_tokens: Histogram | None


class Figures(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The figures of one replica, or of several together."""

    waiting: float | None = None
    running: float | None = None
    kv_percent: float | None = None
    """The KV cache usage; the mean over several replicas."""
    prompt_tokens_per_second: float | None = None
    generation_tokens_per_second: float | None = None
    time_to_first_token_p50: float | None = None
    """In seconds."""
    time_to_first_token_p95: float | None = None
    prefix_hit_percent: float | None = None
    """The share of prompt tokens that were found in the prefix cache."""
    preemptions_per_second: float | None = None
    missing: Mapping[str, str] = {}
    """The reason for each unknown figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """The growth of one replica's counters; ``seconds`` is 0 without an earlier reading."""

    latest: Reading
    seconds: float
    counters: Mapping[str, float]
    first_tokens: Histogram | None


def reading_of(points: Iterable[Point], *, time: float) -> Reading | None:
    """Return the reading of a page, or None if it has none of the series."""
    values: dict[str, float] = {}
    buckets: dict[float, float] = {}
    for point in points:
        if point.name == m.FIRST_TOKEN_TIME_BUCKET:
            bound = float(point.labels.get("le", "nan"))
            buckets[bound] = buckets.get(bound, 0.0) + point.value
        elif math.isfinite(point.value):
            # Over the labels that split one figure, such as the engine's.
            values[point.name] = values.get(point.name, 0.0) + point.value
    if not values:
        return None
    bounds = tuple(sorted(buckets))
    whole = bool(bounds) and bounds[-1] == math.inf
    histogram = Histogram(bounds=bounds, counts=tuple(buckets[bound] for bound in bounds)) if whole else None
    return Reading(time=time, values=values, first_tokens=histogram)


def growth(before: Reading | None, after: Reading) -> Growth:
    """Return the growth between two readings; it is unknown if the engine restarted between them."""
    fresh = Growth(latest=after, seconds=0.0, counters={}, first_tokens=None)
    if before is None or after.time <= before.time:
        return fresh
    both = [name for name in _COUNTERS if name in before.values and name in after.values]
    counters = {name: after.values[name] - before.values[name] for name in both}
    if any(grown < 0 for grown in counters.values()):
        return fresh
    first = _between(before.first_tokens, after.first_tokens)
    return Growth(latest=after, seconds=after.time - before.time, counters=counters, first_tokens=first)


def figures(grown: Sequence[Growth]) -> Figures:
    """Return the figures of these replicas together."""
    if not grown:
        return Figures(missing={name: _NO_ANSWER for name in Figures.__struct_encode_fields__ if name != "missing"})
    missing: dict[str, str] = {}

    def known(name: str, value: float | None, why: str) -> float | None:
        if value is None:
            missing[name] = why
        return value

    rated = [each for each in grown if each.seconds > 0]
    late = _SECOND_POLL if not rated else _NOT_EXPORTED
    p50, p95 = (_quantile([each.first_tokens for each in rated], q) for q in (0.5, 0.95))
    first = _SECOND_POLL if not rated else _NO_FIRST_TOKEN
    if rated and all(each.latest.first_tokens is None for each in rated):
        first = _NOT_EXPORTED
    usage = [each.latest.values[m.KV_USAGE] for each in grown if m.KV_USAGE in each.latest.values]
    return Figures(
        waiting=known("waiting", _sum(grown, m.WAITING), _NOT_EXPORTED),
        running=known("running", _sum(grown, m.RUNNING), _NOT_EXPORTED),
        kv_percent=known("kvPercent", 100 * sum(usage) / len(usage) if usage else None, _NOT_EXPORTED),
        prompt_tokens_per_second=known("promptTokensPerSecond", _rate(rated, m.PROMPT_TOKENS), late),
        generation_tokens_per_second=known("generationTokensPerSecond", _rate(rated, m.GENERATION_TOKENS), late),
        time_to_first_token_p50=known("timeToFirstTokenP50", p50, first),
        time_to_first_token_p95=known("timeToFirstTokenP95", p95, first),
        prefix_hit_percent=known("prefixHitPercent", _hits(rated), _NO_PROMPT if rated else late),
        preemptions_per_second=known("preemptionsPerSecond", _rate(rated, PREEMPTIONS), late),
        missing=missing,
    )


def quantile(histogram: Histogram, q: float) -> float | None:
    """Return a quantile as histogram_quantile of Prometheus does: linear within a bucket, else the last bound."""
    if histogram.total <= 0:
        return None
    rank = q * histogram.total
    index = next(i for i, count in enumerate(histogram.counts) if count >= rank)
    if math.isinf(histogram.bounds[index]):
        return histogram.bounds[index - 1] if index else None
    lower = histogram.bounds[index - 1] if index else 0.0
    below = histogram.counts[index - 1] if index else 0.0
    inside = histogram.counts[index] - below
    return lower + (histogram.bounds[index] - lower) * ((rank - below) / inside if inside else 1.0)


def _quantile(histograms: Iterable[Histogram | None], q: float) -> float | None:
    """Return the quantile over all histograms with the buckets of the first."""
    there = [histogram for histogram in histograms if histogram is not None]
    same = [histogram for histogram in there if histogram.bounds == there[0].bounds]
    if not same:
        return None
    counts = tuple(map(sum, zip(*(histogram.counts for histogram in same), strict=True)))
    return quantile(Histogram(bounds=same[0].bounds, counts=counts), q)


def _between(before: Histogram | None, after: Histogram | None) -> Histogram | None:
    if before is None or after is None or before.bounds != after.bounds:
        return None
    counts = tuple(b - a for a, b in zip(before.counts, after.counts, strict=True))
    return Histogram(bounds=after.bounds, counts=counts) if min(counts) >= 0 else None


def _sum(grown: Sequence[Growth], name: str) -> float | None:
    values = [each.latest.values[name] for each in grown if name in each.latest.values]
    return sum(values) if values else None


def _rate(rated: Sequence[Growth], name: str) -> float | None:
    rates = [each.counters[name] / each.seconds for each in rated if name in each.counters]
    return sum(rates) if rates else None


def _hits(rated: Sequence[Growth]) -> float | None:
    queries = sum(each.counters.get(CACHE_QUERIES, 0.0) for each in rated)
    hits = sum(each.counters.get(m.CACHE_HITS, 0.0) for each in rated)
    return 100 * hits / queries if queries > 0 else None


class Sort(StrEnum):
    """The order of rows: ascending by name, descending by anything else."""

    name = "name"
    queue = "queue"
    running = "running"
    kv = "kv"
    tokens = "tokens"
    ttft = "ttft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica; ``id`` is unique among all."""

    id: str
    name: str
    phase: str
    url: str | None = None
    """The address of its metrics."""
    pod: Key | None = None
    reading: Reading | None = None
    earlier: Reading | None = None
    """The reading to compare a first poll with, if there is one."""
    silence: str = ""
    """The reason why there is no reading."""

    @property
    def has_metrics(self) -> bool:
        return self.phase in _WITH_METRICS and (self.url is not None or self.pod is not None)

    @property
    def target(self) -> str:
        """The host and port, by which Prometheus names it."""
        return "" if self.url is None else self.url.partition("://")[2].partition("/")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """An LLMDeployment with its replicas."""

    namespace: str | None
    name: str
    asked: int | None
    ready: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All LLMDeployments at one poll."""

    place: str
    how: str
    """The way in which the figures were read, as text."""
    deployments: tuple[Deployment, ...]
    note: str | None = None
    """A problem that concerns all, such as a run that has ended."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    phase: str
    silence: str | None
    figures: Figures


class DeploymentLoad(msgspec.Struct, frozen=True, kw_only=True):
    namespace: str | None
    name: str
    asked: int | None
    ready: int
    answering: int
    figures: Figures
    replicas: tuple[ReplicaLoad, ...]

    @property
    def title(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"


class FleetLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of all LLMDeployments, sorted."""

    place: str
    how: str
    note: str | None
    seconds: float
    """The period of rates; 0 at the first poll."""
    deployments: tuple[DeploymentLoad, ...]


@dataclass(slots=True)
class Loads:
    """The readings of the last ``seconds``, from which counters become rates."""

    seconds: float
    _seen: dict[str, list[Reading]] = field(default_factory=dict)

    def update(self, fleet: Fleet, *, sort: Sort) -> FleetLoad:
        """Add a poll and return the load. Replicas that are gone are dropped."""
        replicas = [replica for deployment in fleet.deployments for replica in deployment.replicas]
        self._seen = {replica.id: self._seen.get(replica.id, []) for replica in replicas}
        for replica in replicas:
            if replica.earlier is not None and not self._seen[replica.id]:
                self._seen[replica.id].append(replica.earlier)
        grown = {r.id: self._grown(r.id, r.reading) for r in replicas if r.reading is not None}
        loads = [_deployment_load(deployment, grown, sort) for deployment in fleet.deployments]
        return FleetLoad(
            place=fleet.place,
            how=fleet.how,
            note=fleet.note,
            seconds=max((each.seconds for each in grown.values()), default=0.0),
            deployments=tuple(sorted(loads, key=lambda load: (_rank(load.figures, sort), load.title))),
        )

    def _grown(self, replica: str, reading: Reading) -> Growth:
        seen = self._seen[replica]
        if not seen or reading.time > seen[-1].time:
            seen.append(reading)
        while len(seen) > 2 and reading.time - seen[1].time >= self.seconds:
            seen.pop(0)
        before = seen[0] if len(seen) > 1 else None
        grown = growth(before, seen[-1])
        if before is not None and grown.seconds == 0:
            self._seen[replica] = [seen[-1]]  # it restarted: earlier readings do not compare
        return grown


def _deployment_load(deployment: Deployment, grown: Mapping[str, Growth], sort: Sort) -> DeploymentLoad:
    loads = [
        ReplicaLoad(
            name=replica.name,
            phase=replica.phase,
            silence=None if replica.reading is not None else replica.silence,
            figures=figures([grown[replica.id]] if replica.id in grown else []),
        )
        for replica in deployment.replicas
    ]
    together = [grown[replica.id] for replica in deployment.replicas if replica.id in grown]
    return DeploymentLoad(
        namespace=deployment.namespace,
        name=deployment.name,
        asked=deployment.asked,
        ready=deployment.ready,
        answering=len(together),
        figures=figures(together),
        replicas=tuple(sorted(loads, key=lambda load: (_rank(load.figures, sort), load.name))),
    )


def _rank(load: Figures, sort: Sort) -> float:
    """Return the sort key: the greatest first, unknown figures last."""
    value = {
        Sort.name: 0.0,
        Sort.queue: load.waiting,
        Sort.running: load.running,
        Sort.kv: load.kv_percent,
        Sort.tokens: load.generation_tokens_per_second,
        Sort.ttft: load.time_to_first_token_p95,
    }[sort]
    return float("inf") if value is None else -value
