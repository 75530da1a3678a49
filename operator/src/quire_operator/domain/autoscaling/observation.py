"""The observation of one tick: the replicas of one LLMDeployment and their metrics.

``autoscale`` builds it from the cluster's view (which replicas, in which phase) and from what ``ports.Metrics`` read;
``autoscaler`` evaluates it. Counters are raw and cumulative, as exported. Increments are computed where the history is,
so that scraping the pods and querying Prometheus feed the same policy.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import le, lt


class ReplicaPhase(StrEnum):
    """The phase of a replica. Only a ready one gets requests; a draining one finishes those that it has."""

    PENDING = "Pending"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """A cumulative histogram: ``counts[i]`` observations were at most ``bounds[i]``; the last bound is infinity."""

    bounds: tuple[float, ...]
    counts: tuple[float, ...]

    @property
    def total(self) -> float:
        return self.counts[-1] if self.counts else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSample:
    """The metrics of one replica at ``time``, the Unix time of the measurement, not of the query.

    A counter is None if the engine does not export it. A replica without all other values has no sample.
    """

    time: float
    # Gauges.
    waiting: float
    running: float
    queued_prompt_tokens: float
    kv_tokens_used: float
    kv_tokens_capacity: float
    # Counters.
    arrived_requests: float | None = None
    arrived_prompt_tokens: float | None = None
    """Prompt tokens that arrived, without those found in the prefix cache."""
    prompt_tokens: float = 0.0
    """Prompt tokens that were computed or found in the cache so far."""
    cached_prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    rejected_drafts: float = 0.0
    """Draft tokens that steps computed in addition to the generated tokens."""
    finished_requests: float = 0.0
    steps: float | None = None
    busy_seconds: float | None = None
    """The time spent in steps, summed over their parts."""
    first_token_waits: Histogram | None = None
    """The time that first tokens waited beyond the prefill of their own prompt."""
    first_token_times: Histogram | None = None
    """The whole time to first tokens."""
    token_gaps: Histogram | None = None
    """The time between tokens."""

    @property
    def histograms(self) -> tuple[Histogram | None, ...]:
        return self.first_token_waits, self.first_token_times, self.token_gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaObservation:
    """A replica with its phase and, if it has one, its sample."""

    name: str
    phase: ReplicaPhase
    sample: ReplicaSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The facts about one LLMDeployment at one tick."""

    replicas: tuple[ReplicaObservation, ...]
    target: int | None = None
    """The number of replicas requested now; None if none was requested yet, so that the existing replicas count."""
    held_requests: int | None = None
    """The requests that gateways hold because no replica is ready; None if no gateway answered."""
    in_flight_requests: int | None = None
    """The requests that gateways have sent to replicas; None unless every gateway answered."""
    rolling_out: bool = False


_HISTOGRAMS = frozenset({"first_token_waits", "first_token_times", "token_gaps"})
_FIGURES = tuple(field.name for field in fields(ReplicaSample) if field.name not in _HISTOGRAMS)


_COUNTABLE = 2.0**53
"""Larger floats do not count in steps of one, and the squares in the rates would overflow."""


def is_sane(sample: ReplicaSample) -> bool:
    """Return True if no value is negative, not a number or too large to count, and the KV cache has a size."""
    figures = [value for value in map(sample.__getattribute__, _FIGURES) if value is not None]
    if not all(map(math.isfinite, figures)) or min(figures) < 0 or sample.kv_tokens_capacity <= 0:
        return False
    if max(figures) > _COUNTABLE:
        return False
    return all(histogram is None or _is_sane_histogram(histogram) for histogram in sample.histograms)


def _is_sane_histogram(histogram: Histogram) -> bool:
    counts, bounds = histogram.counts, histogram.bounds
    if len(counts) != len(bounds) or not counts:
        return False
    rising = all(map(le, counts, counts[1:]))
    ordered = all(map(lt, bounds, bounds[1:]))
    # Counts that rise from zero to a countable number are valid in between; comparisons with NaN fail.
    return rising and ordered and counts[0] >= 0 and counts[-1] <= _COUNTABLE


def without_duplicates(replicas: Iterable[ReplicaObservation]) -> tuple[ReplicaObservation, ...]:
    """Return one observation per name, the one with the newest sample, sorted by name."""
    newest: dict[str, ReplicaObservation] = {}
    for replica in replicas:
        known = newest.get(replica.name)
        if known is None or _sample_time(known) < _sample_time(replica):
            newest[replica.name] = replica
    return tuple(newest[name] for name in sorted(newest))


def _sample_time(replica: ReplicaObservation) -> float:
    return -math.inf if replica.sample is None or math.isnan(replica.sample.time) else replica.sample.time
