"""The autoscaler of local processes: its evaluations, inputs and effects."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from quire_cli.local.replicas import LocalCluster
from quire_cli.local.state import Rules
from quire_operator.api import AutoscalingMode, MetricsSource, Spec
from quire_operator.autoscaling.autoscale import Autoscaler, Subject, keep_scaling
from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.history import ScalingRecord
from quire_operator.autoscaling.schedules import Bounds, recorded_bounds
from quire_operator.autoscaling.scrape import MetricsSources
from quire_operator.autoscaling.ticks import Log, Tick, noted, tick_of

_LOG_LIMIT = 60
"""The number of stretches of equal decisions that are kept."""


class LocalScaling:
    """The scaling loop of local mode, which implements ``autoscaling.autoscale.Fleet``."""

    def __init__(
        self,
        specs: Sequence[Spec],
        cluster: LocalCluster,
        *,
        metrics: MetricsSources,
        tick_seconds: float,
        decided: Callable[[Spec, Tick], None],
    ) -> None:
        self._policies = [(spec, policy) for spec in specs if (policy := Policy.of(spec)) is not None]
        self._cluster, self._metrics, self._tick_seconds, self._decided = cluster, metrics, tick_seconds, decided
        self._autoscaler = Autoscaler(metrics=metrics, target=self, clock=time.time)
        self.decisions: dict[str, Log] = {}
        self._records: dict[str, ScalingRecord] = {}

    async def run(self) -> None:
        if self._policies:
            await keep_scaling(self._autoscaler, self, tick_seconds=self._tick_seconds)
        await asyncio.Event().wait()

    def subjects(self) -> list[Subject]:
        return [self._subject(spec, policy) for spec, policy in self._policies]

    def sleeping(self) -> list[Subject]:
        return [
            subject
            for subject in self.subjects()
            if subject.target == 0 and subject.policy.autoscaling.mode is AutoscalingMode.ENFORCE
        ]

    def note(self, decisions: Mapping[str, Decision]) -> None:
        for spec, policy in self._policies:
            decision = decisions.get(spec.name)
            if decision is None:
                continue
            by_prometheus = self._by_prometheus(policy)
            tick = tick_of(
                decision,
                source=MetricsSource.PROMETHEUS if by_prometheus else MetricsSource.PODS,
                problem=self._metrics.prometheus_problem if by_prometheus else None,
            )
            self.decisions[spec.name] = noted(self.decisions.get(spec.name, ()), tick, limit=_LOG_LIMIT)
            self._decided(spec, tick)

    async def persist(self, key: str, record: ScalingRecord) -> None:
        """Keep the record for this run: processes do not outlive it, so no later run needs the record."""
        self._records[key] = record

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        self._cluster.scale(key, replicas=replicas, victims=victims)

    def rules(self, spec: Spec, now: float) -> Rules | None:
        """Return the rules at ``now``; None for a fixed number of replicas."""
        bounds = self._bounds(spec, now)
        return None if spec.autoscaling is None or bounds is None else Rules.of(spec.autoscaling, bounds)

    def initial_replicas(self, spec: Spec, now: float) -> int:
        """Return the number of replicas to start with at ``now``."""
        bounds = self._bounds(spec, now)
        return spec.initial_replicas if bounds is None else bounds.clamp(spec.initial_replicas)

    def _bounds(self, spec: Spec, now: float) -> Bounds | None:
        record = self._records.get(spec.name)
        return None if spec.autoscaling is None else recorded_bounds(spec.autoscaling, record, now)

    def _subject(self, spec: Spec, policy: Policy) -> Subject:
        by_prometheus = self._by_prometheus(policy)
        return Subject(
            key=spec.name,
            model=spec.model.served_name,
            policy=policy,
            replicas=tuple(replace(one, by_prometheus=by_prometheus) for one in self._cluster.addresses(spec.name)),
            target=self._cluster.target(spec.name),
        )

    def _by_prometheus(self, policy: Policy) -> bool:
        # Without a Prometheus here, a file made for a cluster that has one is served all the same.
        return self._metrics.has_prometheus and policy.autoscaling.metrics_source is not MetricsSource.PODS
