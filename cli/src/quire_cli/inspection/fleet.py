"""All LLMDeployments and their replicas at one poll of ``quire top``, and the same with figures. Pure.

The sources poll (``Fleet``); ``Loads`` keeps the last seconds and computes a sorted ``FleetLoad``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from quire_cli.inspection.load import Figures, Growth, Reading, figures, growth


class Sort(StrEnum):
    """The order of rows: ascending by name, descending by anything else."""

    name = "name"
    queue = "queue"
    running = "running"
    kv = "kv"
    tokens = "tokens"
    ttft = "ttft"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A replica; ``id`` is unique among all."""

    id: str
    name: str
    phase: str
    reading: Reading | None = None
    earlier: Reading | None = None
    """The reading to compare a first poll with, if there is one."""
    silence: str = ""
    """The reason why there is no reading."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """An LLMDeployment with its replicas."""

    namespace: str | None
    name: str
    asked: int | None
    ready: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All LLMDeployments at one poll."""

    place: str
    how: str
    """The way in which the figures were read, as text."""
    deployments: tuple[Deployment, ...]
    note: str | None = None
    """A problem that concerns all, such as a run that has ended."""


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one replica."""

    name: str
    phase: str
    silence: str | None
    figures: Figures


class DeploymentLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of one LLMDeployment."""

    namespace: str | None
    name: str
    asked: int | None
    ready: int
    answering: int
    figures: Figures
    replicas: tuple[ReplicaLoad, ...]

    @property
    def title(self) -> str:
        return self.name if self.namespace is None else f"{self.namespace}/{self.name}"


class FleetLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load of all LLMDeployments, sorted."""

    place: str
    how: str
    note: str | None
    seconds: float
    """The period of rates; 0 at the first poll."""
    deployments: tuple[DeploymentLoad, ...]


@dataclass(slots=True)
class Loads:
    """The readings of the last ``seconds``, from which counters become rates."""

    seconds: float
    _seen: dict[str, list[Reading]] = field(default_factory=dict)

    def update(self, fleet: Fleet, *, sort: Sort) -> FleetLoad:
        """Add a poll and return the load. Replicas that are gone are dropped."""
        replicas = [replica for deployment in fleet.deployments for replica in deployment.replicas]
        self._seen = {replica.id: self._seen.get(replica.id, []) for replica in replicas}
        for replica in replicas:
            if replica.earlier is not None and not self._seen[replica.id]:
                self._seen[replica.id].append(replica.earlier)
        grown = {r.id: self._grown(r.id, r.reading) for r in replicas if r.reading is not None}
        loads = [_deployment_load(deployment, grown, sort) for deployment in fleet.deployments]
        return FleetLoad(
            place=fleet.place,
            how=fleet.how,
            note=fleet.note,
            seconds=max((each.seconds for each in grown.values()), default=0.0),
            deployments=tuple(sorted(loads, key=lambda load: (_rank(load.figures, sort), load.title))),
        )

    def _grown(self, replica: str, reading: Reading) -> Growth:
        seen = self._seen[replica]
        if not seen or reading.time > seen[-1].time:
            seen.append(reading)
        while len(seen) > 2 and reading.time - seen[1].time >= self.seconds:
            seen.pop(0)
        before = seen[0] if len(seen) > 1 else None
        grown = growth(before, seen[-1])
        if before is not None and grown.seconds == 0:
            self._seen[replica] = [seen[-1]]  # it restarted: earlier readings do not compare
        return grown


def _deployment_load(deployment: Deployment, grown: Mapping[str, Growth], sort: Sort) -> DeploymentLoad:
    loads = [
        ReplicaLoad(
            name=replica.name,
            phase=replica.phase,
            silence=None if replica.reading is not None else replica.silence,
            figures=figures([grown[replica.id]] if replica.id in grown else []),
        )
        for replica in deployment.replicas
    ]
    together = [grown[replica.id] for replica in deployment.replicas if replica.id in grown]
    return DeploymentLoad(
        namespace=deployment.namespace,
        name=deployment.name,
        asked=deployment.asked,
        ready=deployment.ready,
        answering=len(together),
        figures=figures(together),
        replicas=tuple(sorted(loads, key=lambda load: (_rank(load.figures, sort), load.name))),
    )


def _rank(load: Figures, sort: Sort) -> float:
    """Return the sort key: the greatest first, unknown figures last."""
    value = {
        Sort.name: 0.0,
        Sort.queue: load.waiting,
        Sort.running: load.running,
        Sort.kv: load.kv_percent,
        Sort.tokens: load.generation_tokens_per_second,
        Sort.ttft: load.time_to_first_token_p95,
    }[sort]
    return float("inf") if value is None else -value
