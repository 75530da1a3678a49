"""What the autoscaler sees at one tick: the replicas of one LLMDeployment, and what each said of itself.

Made by ``autoscale`` from what the cluster knows (which replicas, in which phase) and what ``ports.Metrics`` read from
them; judged by ``domain.autoscaler``. Counters are raw and cumulative, as exported: differences are taken where the
history is, so that a scrape of the pods and a query of Prometheus feed one and the same law.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import le, lt


class ReplicaPhase(StrEnum):
    """How far a replica is. Only a ready one takes requests; a draining one finishes those it has."""

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
    """One replica's metrics at ``time`` (Unix seconds, when they were taken, not when they were asked for).

    None: this engine does not export it. Everything else is there or the replica has no sample.
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
    """Prompt tokens that came in, less those found in the prefix cache."""
    prompt_tokens: float = 0.0
    """Prompt tokens computed or found in the cache so far."""
    cached_prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    finished_requests: float = 0.0
    steps: float | None = None
    busy_seconds: float | None = None
    """Time spent in steps, all parts together."""
    first_token_waits: Histogram | None = None
    """How long first tokens waited beyond the prefill of their own prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaObservation:
    """One replica: its phase by the cluster, and its sample, if it gave one."""

    name: str
    phase: ReplicaPhase
    sample: ReplicaSample | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """All that is known of one LLMDeployment at one tick."""

    replicas: tuple[ReplicaObservation, ...]
    target: int | None = None
    """How many replicas are asked for now; None where nobody asked yet: the replicas there are count instead."""
    held_requests: int | None = None
    """Requests that the gateways hold because no replica is ready; None when no gateway answered."""
    in_flight_requests: int | None = None
    """Requests that the gateways have at a replica now; None unless every gateway answered."""
    rolling_out: bool = False


_FIGURES = tuple(field.name for field in fields(ReplicaSample) if field.name != "first_token_waits")


_COUNTABLE = 2.0**53
"""Beyond it a float does not count one by one; and the squares that rates are learnt from come to no number."""


def is_sane(sample: ReplicaSample) -> bool:
    """No figure in it is negative, not a number or beyond counting, and a replica that has a KV cache says so."""
    figures = [value for value in map(sample.__getattribute__, _FIGURES) if value is not None]
    if not all(map(math.isfinite, figures)) or min(figures) < 0 or sample.kv_tokens_capacity <= 0:
        return False
    if max(figures) > _COUNTABLE:
        return False
    return sample.first_token_waits is None or _is_sane_histogram(sample.first_token_waits)


def _is_sane_histogram(histogram: Histogram) -> bool:
    counts, bounds = histogram.counts, histogram.bounds
    if len(counts) != len(bounds) or not counts:
        return False
    rising = all(map(le, counts, counts[1:]))
    ordered = all(map(lt, bounds, bounds[1:]))
    # Rising from zero to what can be counted, all in between is as well; what is no number never compares.
    return rising and ordered and counts[0] >= 0 and counts[-1] <= _COUNTABLE


def without_duplicates(replicas: Iterable[ReplicaObservation]) -> tuple[ReplicaObservation, ...]:
    """One observation per name, the one with the newest sample, in order of name."""
    newest: dict[str, ReplicaObservation] = {}
    for replica in replicas:
        known = newest.get(replica.name)
        if known is None or _sample_time(known) < _sample_time(replica):
            newest[replica.name] = replica
    return tuple(newest[name] for name in sorted(newest))


def _sample_time(replica: ReplicaObservation) -> float:
    return -math.inf if replica.sample is None or math.isnan(replica.sample.time) else replica.sample.time
