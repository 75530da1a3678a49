"""KEDA: a ScaledObject with a ``prometheus`` trigger.

KEDA serves the query's result as an external metric with ``averageValue`` to the HPA that it creates; the HPA scales
between 1 and ``maxReplicaCount``, KEDA itself to and from 0.

https://keda.sh/docs/2.17/reference/scaledobject-spec/ and https://keda.sh/docs/2.17/scalers/prometheus/: an empty
result is 0 unless ``ignoreNullValues`` is false; then it is an error, and after ``failureThreshold`` of them in a row
the metric becomes ``threshold · fallback.replicas``, if there is a fallback; otherwise the HPA gets no metric and
holds. ``pollingInterval`` and ``cooldownPeriod`` count only while at 0 or on the way there: between 1 and N the HPA's
sync period determines the queries (metrics are cached only with ``useCachedMetrics``).
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
from quire_cli.simulation.scaler import Scaling
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample

SCRAPE_SECONDS = 15.0
POLLING_SECONDS = 30.0
COOLDOWN_SECONDS = 300.0
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
class Fallback:
    replicas: int
    failure_threshold: int = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class KedaConfig:
    """The configuration of one ScaledObject. Query and threshold have no published default: the tuner chooses them."""

    query: Query = Query.IN_FLIGHT
    threshold: float = 16.0
    activation_threshold: float = 0.0
    ignore_null_values: bool = True
    fallback: Fallback | None = None
    cooldown_seconds: float = COOLDOWN_SECONDS
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
        fallback = self._config.fallback
        if fallback is None or self._failures <= fallback.failure_threshold:
            return None
        return self._config.threshold * fallback.replicas


class KedaScaler:
    """KEDA for the simulator's protocol."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: KedaConfig, *, minimum: int, maximum: int) -> None:
        self._config = config
        self._minimum = minimum
        self._series = Series(_RANGE_SECONDS)
        self._trigger = Trigger(config)
        self._controller = Controller(up=config.up, down=config.down, minimum=max(1, minimum), maximum=maximum)
        self._active_at = 0.0
        self._polled_at = float("-inf")

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        value = self._trigger.metric(self._result(pods, now))
        if self._minimum == 0:
            idle = self._idle(pods, value, now)
            if idle is not None:
                return Scaling(replicas=idle)
        if value is None:
            return Scaling(replicas=self._controller.settle(None, pods.current, now))
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

    def _idle(self, pods: Pods, value: float | None, now: float) -> int | None:
        """Return KEDA's own decision, from and to 0; None if the HPA decides."""
        active = value is not None and value > self._config.activation_threshold
        if active:
            self._active_at = now
        if pods.current > 0:
            return 0 if not active and now - self._active_at >= self._config.cooldown_seconds else None
        if now - self._polled_at < POLLING_SECONDS:
            return 0
        self._polled_at = now
        return 1 if active else 0
