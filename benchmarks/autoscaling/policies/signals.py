"""The view of an observation through a metrics pipeline: which pods exist, and which series are fresh.

It is between the simulator's observation and the peers' formulas. A failed scrape ends a series at once in Prometheus
(it marks it stale), so a query does not find a sample that is older than its scrape interval.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire_operator.domain.autoscaling.observation import Observation, ReplicaPhase, ReplicaSample

_SLACK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods:
    """The pods of one Deployment as a pipeline shows them."""

    current: int
    """``spec.replicas``."""
    pending: frozenset[str]
    unready: frozenset[str]
    """The running pods that are not ready."""
    ready: frozenset[str]
    samples: Mapping[str, ReplicaSample]
    """The samples of ready pods with a fresh series."""
    draining: Mapping[str, ReplicaSample]
    """The samples of pods with a deletion timestamp, which Prometheus scrapes until they end."""

    @property
    def missing(self) -> frozenset[str]:
        """The running pods without metrics."""
        return (self.ready | self.unready) - self.samples.keys()


def pods_of(observation: Observation, now: float, *, scrape_seconds: float) -> Pods:
    """Return the pods; samples older than ``scrape_seconds`` belong to a series that has ended."""
    names: dict[ReplicaPhase, set[str]] = {phase: set() for phase in ReplicaPhase}
    samples: dict[str, ReplicaSample] = {}
    draining: dict[str, ReplicaSample] = {}
    for replica in observation.replicas:
        names[replica.phase].add(replica.name)
        if replica.sample is None or now - replica.sample.time > scrape_seconds + _SLACK_SECONDS:
            continue
        if replica.phase is ReplicaPhase.READY:
            samples[replica.name] = replica.sample
        elif replica.phase is ReplicaPhase.DRAINING:
            draining[replica.name] = replica.sample
    there = sum(len(names[phase]) for phase in ReplicaPhase if phase is not ReplicaPhase.DRAINING)
    return Pods(
        current=there if observation.target is None else observation.target,
        pending=frozenset(names[ReplicaPhase.PENDING]),
        unready=frozenset(names[ReplicaPhase.LOADING]),
        ready=frozenset(names[ReplicaPhase.READY]),
        samples=samples,
        draining=draining,
    )


def in_flight(sample: ReplicaSample) -> float:
    """Return the requests in the engine: ``vllm:num_requests_running + vllm:num_requests_waiting``."""
    return sample.running + sample.waiting


def kv_usage(sample: ReplicaSample) -> float:
    """Return ``vllm:kv_cache_usage_perc``, 0 to 1."""
    return sample.kv_tokens_used / sample.kv_tokens_capacity


class Series:
    """The samples of the last ``seconds`` by pod, for range functions of PromQL."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._points: dict[str, deque[ReplicaSample]] = {}

    def add(self, samples: Mapping[str, ReplicaSample], now: float) -> None:
        for name, sample in samples.items():
            points = self._points.setdefault(name, deque())
            if not points or points[-1].time < sample.time:
                points.append(sample)
        for name in list(self._points):
            points = self._points[name]
            while points and points[0].time <= now - self._seconds:
                points.popleft()
            if not points:
                del self._points[name]

    def highest(self, name: str, value: Callable[[ReplicaSample], float]) -> float | None:
        """Return ``max_over_time``; None if the window has no sample."""
        return max((value(sample) for sample in self._points.get(name, ())), default=None)

    def rate(self, counter: Callable[[ReplicaSample], float]) -> dict[str, float]:
        """Return ``rate`` of each pod's counter per second; a pod with one sample has none.

        A fall is a restart from 0.
        """
        rates: dict[str, float] = {}
        for name, points in self._points.items():
            if len(points) < 2:
                continue
            values = [counter(sample) for sample in points]
            pairs = zip(values, values[1:], strict=False)
            increase = sum(after - before if after >= before else after for before, after in pairs)
            rates[name] = increase / (points[-1].time - points[0].time)
        return rates
