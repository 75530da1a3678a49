"""KEDA: a ScaledObject with a ``prometheus`` trigger.

KEDA serves the query's result as an external metric with ``averageValue`` to the HPA that it creates; the HPA scales
between 1 and ``maxReplicaCount``. KEDA itself would scale to and from 0, which the comparison does not.

https://keda.sh/docs/2.17/reference/scaledobject-spec/ and https://keda.sh/docs/2.17/scalers/prometheus/: an empty
result is 0 unless ``ignoreNullValues`` is false; then it is an error, and after ``failureThreshold`` of them in a row
the metric becomes ``threshold · fallback.replicas``, if there is a fallback; otherwise the HPA gets no metric and
holds. Between 1 and N the HPA's sync period determines the queries (metrics are cached only with
``useCachedMetrics``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.autoscaling.policies.hpa import (
    SCALE_DOWN,
    SCALE_UP,
    SYNC_SECONDS,
    Controller,
    Rules,
    replicas_for_average_value,
)
from benchmarks.autoscaling.policies.signals import Pods, Series, in_flight, pods_of
from quire_cli.simulation.fleet import Scaling
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample

SCRAPE_SECONDS = 15.0
_FAILURES = 3
"""``failureThreshold`` in the examples of the page."""
_RANGE_SECONDS = 120.0


class Query(StrEnum):
    """The query that the trigger sends to Prometheus."""

    IN_FLIGHT = "sum(vllm:num_requests_running + vllm:num_requests_waiting)"
    WAITING = "sum(vllm:num_requests_waiting)"
    REQUEST_RATE = "sum(rate(vllm:request_success_total[2m]))"
    TOKEN_RATE = "sum(rate(vllm:prompt_tokens_total[2m]))"


_GAUGES: dict[Query, Callable[[ReplicaSample], float]] = {
    Query.IN_FLIGHT: in_flight,
    Query.WAITING: lambda sample: sample.waiting,
}
_COUNTERS: dict[Query, Callable[[ReplicaSample], float]] = {
    Query.REQUEST_RATE: lambda sample: sample.finished_requests,
    Query.TOKEN_RATE: lambda sample: sample.prompt_tokens,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KedaConfig:
    """The configuration of one ScaledObject. Query and threshold have no published default: the tuner chooses them."""

    query: Query = Query.IN_FLIGHT
    threshold: float = 16.0
    ignore_null_values: bool = True
    fallback_replicas: int | None = None
    up: Rules = SCALE_UP
    down: Rules = SCALE_DOWN


class Trigger:
    """The results of one trigger: the query's value, 0 or an error for an empty one, the fallback after errors."""

    def __init__(self, config: KedaConfig) -> None:
        self._config = config
        self._failures = 0

    def metric(self, result: float | None) -> float | None:
        """Return the value that the HPA receives; None for an error."""
        if result is None and self._config.ignore_null_values:
            result = 0.0
        if result is not None:
            self._failures = 0
            return result
        self._failures += 1
        replicas = self._config.fallback_replicas
        return None if replicas is None or self._failures <= _FAILURES else self._config.threshold * replicas


class KedaScaler:
    """KEDA for the simulator's protocol."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: KedaConfig, *, minimum: int, maximum: int) -> None:
        self._config = config
        self._series = Series(_RANGE_SECONDS)
        self._trigger = Trigger(config)
        self._controller = Controller(up=config.up, down=config.down, minimum=minimum, maximum=maximum)

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        value = self._trigger.metric(self._result(pods, now))
        proposal = None
        if value is not None:
            proposal = replicas_for_average_value(
                value, target=self._config.threshold, current=pods.current, tolerances=self._controller.tolerances
            )
        return Scaling(replicas=self._controller.settle(proposal, pods.current, now))

    def _result(self, pods: Pods, now: float) -> float | None:
        """Evaluate the query over all series; return None without series."""
        scraped = {**pods.samples, **pods.draining}
        self._series.add(scraped, now)
        if self._config.query in _GAUGES:
            values = [_GAUGES[self._config.query](sample) for sample in scraped.values()]
        else:
            values = list(self._series.rate(_COUNTERS[self._config.query]).values())
        return sum(values) if values else None
