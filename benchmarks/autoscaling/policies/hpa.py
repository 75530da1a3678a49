"""Kubernetes' HorizontalPodAutoscaler, ``autoscaling/v2``, on custom metrics of the pods.

Formulas and defaults: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/ ("Algorithm
details", "Configurable scaling behavior"). For questions that these leave open, the order is that of
kube-controller-manager (pkg/controller/podautoscaler, ``replica_calculator.go`` and ``horizontal.go``): a proposal for
each metric, of which the largest counts, then the stabilization windows, then the policies.

Metrics: Prometheus scrapes each 15 s, and the controller queries it through the adapter each 15 s.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.autoscaling.policies.signals import in_flight, kv_usage, pods_of
from quire_cli.simulation.fleet import Scaling
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample

SYNC_SECONDS = 15.0
SCRAPE_SECONDS = 15.0
TOLERANCE = 0.1
_EPSILON = 1e-9


class Unit(StrEnum):
    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An entry of ``behavior.*.policies[]``: at most ``value`` in each period."""

    unit: Unit
    value: float
    period_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules ``behavior.scaleUp`` or ``behavior.scaleDown``, with the default ``selectPolicy: Max``."""

    window_seconds: float
    policies: tuple[Step, ...]
    tolerance: float = TOLERANCE


SCALE_UP = Rules(
    window_seconds=0.0,
    policies=(
        Step(unit=Unit.PERCENT, value=100, period_seconds=15),
        Step(unit=Unit.PODS, value=4, period_seconds=15),
    ),
)
"""The published default."""
SCALE_DOWN = Rules(window_seconds=300.0, policies=(Step(unit=Unit.PERCENT, value=100, period_seconds=15),))
"""The published default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerances:
    up: float = TOLERANCE
    down: float = TOLERANCE

    def cover(self, ratio: float) -> bool:
        """Return whether the ratio is too near to 1 to act."""
        return 1 - self.down - _EPSILON <= ratio <= 1 + self.up + _EPSILON


def replicas_for_pods_metric(
    values: Mapping[str, float],
    *,
    target: float,
    current: int,
    pending: AbstractSet[str] = frozenset(),
    missing: AbstractSet[str] = frozenset(),
    tolerances: Tolerances = Tolerances(),
) -> int | None:
    """Return the replicas for a metric of each pod with the average ``target``; None if no pod has the metric.

    Pods that lack it count as 100 % of the target on the way down and as 0 on the way up; unready pods count as 0 on
    the way up. If that reverses the direction or comes near enough to the target, nothing changes.
    """
    if not values:
        return None
    ratio = sum(values.values()) / len(values) / target
    waits = pending if ratio > 1 else frozenset()
    if not waits and not missing:
        return current if tolerances.cover(ratio) else _whole(ratio * len(values))
    filled = dict(values) | dict.fromkeys(missing, target if ratio < 1 else 0.0) | dict.fromkeys(waits, 0.0)
    cautious = sum(filled.values()) / len(filled) / target
    turned = (ratio < 1 < cautious) or (cautious < 1 < ratio)
    if tolerances.cover(cautious) or turned:
        return current
    wanted = _whole(cautious * len(filled))
    backwards = (cautious < 1 and wanted > current) or (cautious > 1 and wanted < current)
    return current if backwards else wanted


def replicas_for_average_value(
    total: float, *, target: float, current: int, tolerances: Tolerances = Tolerances()
) -> int:
    """Return the replicas for an external metric with ``target.averageValue``, whose total all replicas share."""
    if current > 0 and tolerances.cover(total / (target * current)):
        return current
    return _whole(total / target)


def _whole(replicas: float) -> int:
    return math.ceil(replicas - _EPSILON)


@dataclass(frozen=True, slots=True)
class _Change:
    time: float
    replicas: int


class Controller:
    """The controller's state of one HPA: its recommendations and the changes it made."""

    def __init__(self, *, up: Rules = SCALE_UP, down: Rules = SCALE_DOWN, minimum: int, maximum: int) -> None:
        self._up, self._down = up, down
        self._minimum, self._maximum = minimum, maximum
        self._recommended: list[_Change] = []
        self._changes: list[_Change] = []

    @property
    def tolerances(self) -> Tolerances:
        return Tolerances(up=self._up.tolerance, down=self._down.tolerance)

    def settle(self, proposal: int | None, current: int, now: float) -> int:
        """Return the replicas to request; without a proposal, because no metric could be read, nothing changes."""
        if proposal is None:
            return current
        if not self._recommended:
            self._recommended.append(_Change(now, current))
        wanted = self._bounded(self._limited(self._stabilized(proposal, current, now), current, now))
        if wanted != current:
            self._changes.append(_Change(now, wanted - current))
        return wanted

    def _stabilized(self, proposal: int, current: int, now: float) -> int:
        """Return the stabilized proposal: up to the minimum recommended in the window, down to the maximum."""
        longest = max(self._up.window_seconds, self._down.window_seconds)
        self._recommended = [r for r in self._recommended if r.time > now - longest]
        self._recommended.append(_Change(now, proposal))
        lowest = min(self._within(self._up.window_seconds, now, proposal))
        highest = max(self._within(self._down.window_seconds, now, proposal))
        return min(max(current, lowest), highest)

    def _within(self, seconds: float, now: float, proposal: int) -> list[int]:
        return [proposal, *(r.replicas for r in self._recommended if r.time > now - seconds)]

    def _limited(self, wanted: int, current: int, now: float) -> int:
        if wanted > current:
            return min(wanted, self._limit(self._up, current, now, sign=1))
        if wanted < current:
            return max(wanted, self._limit(self._down, current, now, sign=-1))
        return current

    def _limit(self, rules: Rules, current: int, now: float, *, sign: int) -> int:
        """Return the limits that the policies set now; they count from the start of each period."""
        reaches: list[int] = []
        for step in rules.policies:
            start = current - sum(c.replicas for c in self._changes if c.time > now - step.period_seconds)
            if step.unit is Unit.PODS:
                reaches.append(int(start + sign * step.value))
            elif sign > 0:
                reaches.append(math.ceil(start * (1 + step.value / 100) - _EPSILON))
            else:
                reaches.append(int(start * (1 - step.value / 100) + _EPSILON))
        return max(*reaches, current) if sign > 0 else min(*reaches, current)

    def _bounded(self, replicas: int) -> int:
        return max(self._minimum, min(replicas, self._maximum))


@dataclass(frozen=True, slots=True, kw_only=True)
class PodsMetric:
    """An entry of ``metrics[]`` of type Pods with ``target.averageValue``."""

    name: str
    target: float
    read: Callable[[ReplicaSample], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HpaConfig:
    """The configuration of one HPA. There are no published targets for these metrics: the tuner chooses them."""

    requests_per_pod: float = 16.0
    """The average of running and waiting requests."""
    kv_usage: float | None = None
    """The average share of the KV cache in use, as a second metric."""
    up: Rules = SCALE_UP
    down: Rules = SCALE_DOWN

    def metrics(self) -> Sequence[PodsMetric]:
        requests = PodsMetric(name="requests", target=self.requests_per_pod, read=in_flight)
        if self.kv_usage is None:
            return (requests,)
        return (requests, PodsMetric(name="kv_cache_usage_perc", target=self.kv_usage, read=kv_usage))


class HpaScaler:
    """The HPA for the simulator's protocol."""

    period_seconds = SYNC_SECONDS
    scrape_seconds = SCRAPE_SECONDS

    def __init__(self, config: HpaConfig, *, minimum: int, maximum: int) -> None:
        self._metrics = config.metrics()
        self._controller = Controller(up=config.up, down=config.down, minimum=minimum, maximum=maximum)

    def decide(self, observation: Observation, now: float) -> Scaling:
        pods = pods_of(observation, now, scrape_seconds=self.scrape_seconds)
        proposals = [
            replicas_for_pods_metric(
                {name: metric.read(sample) for name, sample in pods.samples.items()},
                target=metric.target,
                current=pods.current,
                pending=pods.pending,
                missing=pods.missing,
                tolerances=self._controller.tolerances,
            )
            for metric in self._metrics
        ]
        known = [proposal for proposal in proposals if proposal is not None]
        return Scaling(replicas=self._controller.settle(max(known, default=None), pods.current, now))
