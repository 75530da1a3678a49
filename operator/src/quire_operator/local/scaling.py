"""The autoscaler at work on local processes: its ticks, what it is told, what it may do."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire_operator.adapters.processes import LocalCluster
from quire_operator.autoscale import Autoscaler, Subject
from quire_operator.domain.autoscaler import Decision, Policy
from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.spec import MetricsSource, Spec
from quire_operator.local.snapshot import LastDecision
from quire_operator.ports import Metrics


class WallClock:
    """Implements ``ports.Clock``."""

    def now(self) -> float:
        return time.time()


class LocalScaling:
    """Implements ``ports.ScaleTarget`` and runs the loop. ``persist_all`` writes the state file."""

    def __init__(
        self,
        specs: Sequence[Spec],
        cluster: LocalCluster,
        *,
        metrics: Metrics,
        has_prometheus: bool = False,
        tick_seconds: float,
        persist_all: Callable[[], None],
        decided: Callable[[Spec, LastDecision], None],
    ) -> None:
        self._policies = [(spec, policy) for spec in specs if (policy := Policy.of(spec)) is not None]
        self._cluster, self._tick_seconds = cluster, tick_seconds
        self._has_prometheus = has_prometheus
        self._persist_all, self._decided = persist_all, decided
        self._autoscaler = Autoscaler(metrics=metrics, target=self, clock=WallClock())
        self.records: dict[str, ScalingRecord] = {}
        self.decisions: dict[str, LastDecision] = {}

    async def run(self) -> None:
        """Tick for ever."""
        while self._policies:
            await asyncio.sleep(self._tick_seconds)
            await self.tick()
        await asyncio.Event().wait()

    async def tick(self) -> None:
        decisions = await self._autoscaler.tick([self._subject(spec, policy) for spec, policy in self._policies])
        for spec, _ in self._policies:
            self.decisions[spec.name] = _told(decisions[spec.name])
            self._decided(spec, self.decisions[spec.name])

    async def persist(self, key: str, record: ScalingRecord) -> None:
        self.records[key] = record
        self._persist_all()

    async def scale(self, key: str, *, replicas: int, victims: Sequence[str]) -> None:
        self._cluster.scale(key, replicas=replicas, victims=victims)

    def _subject(self, spec: Spec, policy: Policy) -> Subject:
        # Without a Prometheus here, a file made for a cluster that has one is served all the same.
        by_prometheus = self._has_prometheus and policy.autoscaling.metrics_source is not MetricsSource.PODS
        return Subject(
            key=spec.name,
            model=spec.model.served_name,
            policy=policy,
            replicas=tuple(replace(one, by_prometheus=by_prometheus) for one in self._cluster.addresses(spec.name)),
            target=self._cluster.target(spec.name),
        )


def _told(decision: Decision) -> LastDecision:
    return LastDecision(
        time=decision.time,
        current=decision.current,
        desired=decision.desired,
        reason=decision.reason,
        message=decision.message,
        inputs=decision.inputs,
        enforced=decision.enforced,
    )
