"""The observation of one tick: the replicas of one LLMDeployment, their metrics, and the requests at the gateways.

Counters are raw and cumulative, as exported. Increments are computed where the history is, so that scraping the pods
and querying Prometheus feed the same policy.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from operator import le, lt

import msgspec

Clock = Callable[[], float]
"""A clock that returns Unix seconds."""


class ReplicaPhase(StrEnum):
    """The phase of a replica. Only a ready one gets requests; a draining one finishes those that it has."""

    PENDING = "Pending"
    LOADING = "Loading"
    READY = "Ready"
    DRAINING = "Draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """The address and phase of one live replica."""

    name: str
    """A name that is unique among all replicas: the pod's name with its namespace, or the local process's name."""
    phase: ReplicaPhase
    metrics_url: str | None
    """The URL of /metrics; None while the replica has no address."""
    by_prometheus: bool = False
    """True if the metrics of this replica come from Prometheus."""


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


class _Counts(msgspec.Struct, frozen=True, rename="camel"):
    held: int = 0
    in_flight: int = 0


class _Page(msgspec.Struct, frozen=True):
    models: dict[str, _Counts]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequests:
    """The requests that gateways have, by served model name; a model without any is absent."""

    held: Mapping[str, int]
    """Requests that wait because no replica can accept them."""
    in_flight: Mapping[str, int]
    """Requests that a replica processes."""
    is_complete: bool = True
    """True if all gateways are counted, so that an absent model has no requests."""


def read_requests(body: bytes) -> GatewayRequests:
    """Return the requests in one gateway's answer. Raises ``ValueError``."""
    models = msgspec.json.decode(body, type=_Page).models
    return GatewayRequests(
        held={model: counts.held for model, counts in models.items() if counts.held > 0},
        in_flight={model: counts.in_flight for model, counts in models.items() if counts.in_flight > 0},
    )


def summed(answers: Sequence[GatewayRequests | None]) -> GatewayRequests | None:
    """Return the sum over gateways. None stands for a gateway without an answer, and is the sum if none answered."""
    known = [answer for answer in answers if answer is not None]
    if not known:
        return None
    held: dict[str, int] = {}
    in_flight: dict[str, int] = {}
    for answer in known:
        for total, part in ((held, answer.held), (in_flight, answer.in_flight)):
            for model, count in part.items():
                total[model] = total.get(model, 0) + count
    return GatewayRequests(held=held, in_flight=in_flight, is_complete=len(known) == len(answers))


def local_gateway_args(*, host: str, port: int, endpoints_file: str, drain_timeout_seconds: float) -> list[str]:
    """Return the arguments of a gateway in front of local replicas, without the command itself."""
    return [
        *("--host", host, "--port", str(port)),
        *("--endpoints-file", endpoints_file),
        *("--drain-timeout", f"{drain_timeout_seconds:g}"),
    ]
