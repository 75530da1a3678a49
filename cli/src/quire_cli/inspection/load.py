"""The load of replicas for ``quire top``: readings of their metrics become figures over a few seconds. Pure.

An unknown figure is never 0 but None, and ``missing`` has the reason. Names are vLLM's.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from quire_common.contract import engine as m
from quire_common.metrics_page import Point
from quire_operator.domain.autoscaling.observation import Histogram

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
