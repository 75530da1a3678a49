"""The state of a local run at one moment, for the table, the log and the state file. Pure values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from quire_cli.local.process import ProcessIdentity
from quire_cli.local.run_state import ProcessRecord, ReplicaState, RunState, ServedState
from quire_cli.local.scaling_rules import Rules
from quire_cli.local.supervision import Phase, Status
from quire_operator.domain.autoscaling.observation import ReplicaSample
from quire_operator.domain.autoscaling.schedules import Bounds
from quire_operator.domain.autoscaling.ticks import Log, Tick
from quire_operator.domain.resource import Spec

RATE_SECONDS = 4.0
"""The period over which tokens per second are averaged."""


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
class DeploymentView:
    spec: Spec
    target: int
    replicas: tuple[ReplicaView, ...]
    decisions: Log = ()
    """Empty before the first evaluation, and if the number of replicas is fixed."""
    bounds: Bounds | None = None
    """The fewest and the most replicas now; None if the number is fixed."""

    @property
    def decision(self) -> Tick | None:
        """The autoscaler's last evaluation."""
        return self.decisions[-1].last if self.decisions else None

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
    """The counters of the last seconds, from which rates are computed."""

    _seen: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    def update(self, samples: Mapping[str, ReplicaSample]) -> dict[str, float]:
        """Return generated tokens per second by replica; a counter that fell (a restart) starts again."""
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


def as_state(snapshot: Snapshot, *, owner: ProcessIdentity, ended: float | None = None) -> dict[str, object]:
    """Return the snapshot in the form of the state file."""
    identities = ((status.name, status.identity) for status in statuses(snapshot))
    state = RunState(
        pid=owner.pid,
        started=snapshot.started,
        time=snapshot.time,
        ended=ended,
        file=snapshot.file,
        address=snapshot.address,
        owner=_record("quire", owner),
        deployments={view.spec.name: _served_state(view) for view in snapshot.deployments},
        processes=tuple(_record(name, identity) for name, identity in identities if identity is not None),
    )
    written: dict[str, object] = msgspec.to_builtins(state)
    del written["boot"]  # is the folder's to add
    return written


def statuses(snapshot: Snapshot) -> list[Status]:
    """Return the records of all processes, including the gateway."""
    replicas = [replica.status for view in snapshot.deployments for replica in view.replicas]
    return replicas if snapshot.gateway is None else [snapshot.gateway, *replicas]


def _record(name: str, identity: ProcessIdentity) -> ProcessRecord:
    return ProcessRecord(name=name, pid=identity.pid, started=identity.started)


def _served_state(view: DeploymentView) -> ServedState:
    autoscaling = view.spec.autoscaling
    return ServedState(
        served_name=view.spec.model.served_name,
        replicas=view.target,
        ready_replicas=view.ready,
        autoscaling=None if autoscaling is None or view.bounds is None else Rules.of(autoscaling, view.bounds),
        replica_states=tuple(_replica_state(replica.status) for replica in view.replicas),
        decisions=view.decisions,
    )


def _replica_state(status: Status) -> ReplicaState:
    return ReplicaState(
        name=status.name,
        phase=status.phase.value,
        url=status.url,
        restarts=status.restarts,
        reason=status.reason,
    )
