"""How a local run stands at one moment: what the table shows, the log tells and the state file keeps. Pure values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire_operator.adapters.local_supervision import Phase, Status
from quire_operator.domain.history import ScalingRecord
from quire_operator.domain.observation import ReplicaSample
from quire_operator.domain.spec import Spec

RATE_SECONDS = 4.0
"""Tokens per second are averaged over so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    status: Status
    sample: ReplicaSample | None
    tokens_per_second: float | None

    @property
    def kv_percent(self) -> float | None:
        sample = self.sample
        if sample is None or sample.kv_tokens_capacity <= 0:
            return None
        return 100 * sample.kv_tokens_used / sample.kv_tokens_capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class LastDecision:
    """What the autoscaler said at its last tick."""

    time: float
    current: int
    desired: int
    reason: str
    message: str
    inputs: Mapping[str, float]
    enforced: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentView:
    spec: Spec
    target: int
    replicas: tuple[ReplicaView, ...]
    decision: LastDecision | None
    """None before the first tick, and where the number of replicas is fixed."""
    record: ScalingRecord

    @property
    def ready(self) -> int:
        return sum(replica.status.phase is Phase.READY for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    time: float
    started: float
    address: str
    file: str
    gateway: Status | None
    deployments: tuple[DeploymentView, ...]
    draining: bool


@dataclass(slots=True)
class TokenRates:
    """Remembers the counters of the last seconds, to turn them into rates."""

    _seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def update(self, samples: Mapping[str, ReplicaSample]) -> dict[str, float]:
        """Tokens per second by replica, generated ones; a counter that fell (a restart) starts anew."""
        self._seen = {name: seen for name, seen in self._seen.items() if name in samples}
        rates: dict[str, float] = {}
        for name, sample in samples.items():
            seen = self._seen.setdefault(name, [])
            if seen and sample.generation_tokens < seen[-1][1]:
                seen.clear()
            seen.append((sample.time, sample.generation_tokens))
            while len(seen) > 2 and sample.time - seen[1][0] >= RATE_SECONDS:
                seen.pop(0)
            elapsed = sample.time - seen[0][0]
            if elapsed > 0:
                rates[name] = (sample.generation_tokens - seen[0][1]) / elapsed
        return rates


def replica_views(
    statuses: Sequence[Status], samples: Mapping[str, ReplicaSample], rates: Mapping[str, float]
) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(status=s, sample=samples.get(s.name), tokens_per_second=rates.get(s.name)) for s in statuses
    )


def as_state(snapshot: Snapshot, *, pid: int) -> dict[str, object]:
    """The snapshot as the state file has it, for ``quire explain`` and for people."""
    return {
        "pid": pid,
        "started": snapshot.started,
        "time": snapshot.time,
        "file": snapshot.file,
        "address": snapshot.address,
        "deployments": {view.spec.name: _deployment_state(view) for view in snapshot.deployments},
        "processes": [
            {"name": status.name, "pid": status.identity.pid, "started": status.identity.started}
            for status in statuses(snapshot)
            if status.identity is not None
        ],
    }


def statuses(snapshot: Snapshot) -> list[Status]:
    """Of all processes, the gateway's too."""
    replicas = [replica.status for view in snapshot.deployments for replica in view.replicas]
    return replicas if snapshot.gateway is None else [snapshot.gateway, *replicas]


def _deployment_state(view: DeploymentView) -> dict[str, object]:
    autoscaling = view.spec.autoscaling
    decision = view.decision
    return {
        "servedName": view.spec.model.served_name,
        "replicas": view.target,
        "readyReplicas": view.ready,
        "bounds": None if autoscaling is None else [autoscaling.min_replicas, autoscaling.max_replicas],
        "lastDecision": None
        if decision is None
        else {
            "time": decision.time,
            "from": decision.current,
            "to": decision.desired,
            "reason": decision.reason,
            "message": decision.message,
            "inputs": dict(decision.inputs),
            "enforced": decision.enforced,
        },
        "history": [
            {
                "time": change.time,
                "from": change.from_replicas,
                "to": change.to_replicas,
                "reason": change.reason,
                "message": change.message,
                "inputs": dict(change.inputs),
            }
            for change in view.record.changes
        ],
    }
