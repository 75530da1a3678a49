"""The metrics of an engine that the autoscaler reads: from the page of a replica, or as series of Prometheus. Pure."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire_common.contract import engine as m
from quire_common.contract.engine import RUNNING
from quire_common.metrics_page import Point
from quire_operator.autoscaling.observation import Histogram, ReplicaSample

_BUCKETS = frozenset({m.FIRST_TOKEN_WAIT_BUCKET, m.FIRST_TOKEN_TIME_BUCKET, m.TOKEN_GAP_BUCKET})
SPECULATION_NAMES = frozenset({m.DRAFT_TOKENS, m.ACCEPTED_TOKENS})
"""The series that only engines with speculation serve; without them no draft was rejected."""
_GAUGES = frozenset({m.RUNNING, m.WAITING, m.KV_USAGE, m.CACHE_CONFIG, m.QUEUED_TOKENS})
_COUNTERS = frozenset(
    {
        *(m.PROMPT_TOKENS, m.UNCACHED_PROMPT_TOKENS, m.CACHE_HITS, m.GENERATION_TOKENS),
        *(m.ARRIVED_REQUESTS, m.FINISHED, m.STEPS, m.STEP_SECONDS),
    }
)
NAMES = _GAUGES | _COUNTERS | _BUCKETS | SPECULATION_NAMES
"""All series that the autoscaler needs."""
LABELLED = frozenset({m.CACHE_CONFIG, *_BUCKETS})
"""The series whose labels matter; all others are summed over their labels."""


def sample_of(points: Iterable[Point], *, time: float) -> ReplicaSample | None:
    """Return the sample of a replica, or None if required series are missing."""
    sums: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {name: {} for name in _BUCKETS}
    kv_tokens: float | None = None
    for point in points:
        if point.name == m.CACHE_CONFIG:
            kv_tokens = _kv_tokens(point.labels)
        elif point.name in _BUCKETS:
            bound, counts = _number(point.labels.get("le", "")), buckets[point.name]
            if bound is not None:
                counts[bound] = counts.get(bound, 0.0) + point.value
        else:
            # Sum over the labels that split one value: engine, finished_reason, part.
            sums[point.name] = sums.get(point.name, 0.0) + point.value
    if kv_tokens is None or not {m.RUNNING, m.WAITING, m.KV_USAGE} <= sums.keys():
        return None
    return ReplicaSample(
        time=time,
        waiting=sums[m.WAITING],
        running=sums[m.RUNNING],
        queued_prompt_tokens=sums.get(m.QUEUED_TOKENS, 0.0),
        kv_tokens_used=sums[m.KV_USAGE] * kv_tokens,
        kv_tokens_capacity=kv_tokens,
        arrived_requests=sums.get(m.ARRIVED_REQUESTS),
        arrived_prompt_tokens=sums.get(m.UNCACHED_PROMPT_TOKENS),
        prompt_tokens=sums.get(m.PROMPT_TOKENS, 0.0),
        cached_prompt_tokens=sums.get(m.CACHE_HITS, 0.0),
        generation_tokens=sums.get(m.GENERATION_TOKENS, 0.0),
        rejected_drafts=sums.get(m.DRAFT_TOKENS, 0.0) - sums.get(m.ACCEPTED_TOKENS, 0.0),
        finished_requests=sums.get(m.FINISHED, 0.0),
        steps=sums.get(m.STEPS),
        busy_seconds=sums.get(m.STEP_SECONDS),
        first_token_waits=_histogram(buckets[m.FIRST_TOKEN_WAIT_BUCKET]),
        first_token_times=_histogram(buckets[m.FIRST_TOKEN_TIME_BUCKET]),
        token_gaps=_histogram(buckets[m.TOKEN_GAP_BUCKET]),
    )


def _kv_tokens(labels: Mapping[str, str]) -> float | None:
    blocks, size = _number(labels.get("num_gpu_blocks", "")), _number(labels.get("block_size", ""))
    return None if blocks is None or size is None else blocks * size


def _histogram(buckets: Mapping[float, float]) -> Histogram | None:
    if math.inf not in buckets:
        return None
    bounds = tuple(sorted(buckets))
    return Histogram(bounds=bounds, counts=tuple(buckets[bound] for bound in bounds))


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if math.isnan(value) else value


_SPLITS = "engine, finished_reason, part, le, num_gpu_blocks, block_size"
"""The labels that split one value of one replica. Other labels only name the scraper, and the largest value counts. So
a replica that two jobs or two Prometheus servers of one store scrape is not counted twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLabels:
    """The labels that identify a replica. ``instance``, its address, is used if a series has no pod."""

    namespace: str = "namespace"
    pod: str = "pod"

    def replica_of(self, labels: Mapping[str, str]) -> str | None:
        """Return ``namespace/pod``, else ``host:port``, else None.

        A series with a pod is never identified by its address, because another pod may have that address by now.
        """
        pod = labels.get(self.pod)
        return f"{labels.get(self.namespace, '')}/{pod}" if pod else labels.get("instance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """The address of Prometheus and the credentials for it."""

    url: str
    """The URL in front of /api/v1."""
    token_file: Path | None = None
    """A file with a bearer token. It is read at each query, because such tokens are renewed."""
    ca_file: Path | None = None
    """Certificates that replace the system's for the verification of the server."""
    labels: ReplicaLabels = ReplicaLabels()


class Series(NamedTuple):
    """One element of an instant vector."""

    labels: Mapping[str, str]
    time: float
    """The time of the evaluation, by the clock of Prometheus."""
    value: float


class Told(NamedTuple):
    """The metrics of a replica in its last scrape, and their age in seconds."""

    points: list[Point]
    age: float


def figures_query(labels: ReplicaLabels, names: Iterable[str] = NAMES, *, offset: str = "") -> str:
    """Return the query for the engines' metrics with only the labels that identify them, ``offset`` ago."""
    wanted, before = "|".join(sorted(names)), f" offset {offset}" if offset else ""
    by_pod = (
        f"max by (__name__, {labels.namespace}, {labels.pod}, {_SPLITS}) "
        f'({{__name__=~"{wanted}",{labels.pod}!=""}}{before})'
    )
    by_address = f'max by (__name__, instance, {_SPLITS}) ({{__name__=~"{wanted}",{labels.pod}=""}}{before})'
    return f"{by_pod} or {by_address}"


def times_query(labels: ReplicaLabels, *, offset: str = "") -> str:
    before = f" offset {offset}" if offset else ""
    by_pod = f'max by ({labels.namespace}, {labels.pod}) (timestamp({RUNNING}{{{labels.pod}!=""}}{before}))'
    return f'{by_pod} or max by (instance) (timestamp({RUNNING}{{{labels.pod}=""}}{before}))'


def samples(
    figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels, now: float
) -> dict[str, ReplicaSample]:
    """Return the samples by replica. ``now`` is this process's time."""
    read = {
        replica: sample_of(told.points, time=now - told.age)
        for replica, told in by_replica(figures, times, labels=labels).items()
    }
    return {replica: sample for replica, sample in read.items() if sample is not None}


def by_replica(figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels) -> dict[str, Told]:
    """Return the metrics by replica, if the time of their scrape is known.

    The age is computed with Prometheus' clock only, because the two clocks may differ.
    """
    replica_of = labels.replica_of
    ages = {replica_of(series.labels): series.time - series.value for series in times}
    points: dict[str, list[Point]] = {}
    for found, _, value in figures:
        replica = replica_of(found)
        if replica is not None:
            points.setdefault(replica, []).append(Point(found.get("__name__", ""), found, value))
    return {
        replica: Told(points, ages[replica])
        for replica, points in points.items()
        if replica in ages and math.isfinite(ages[replica])
    }
