"""What to ask of Prometheus, and how its answer becomes one sample a replica. Pure; ``adapters/prometheus`` asks.

Two instant queries serve all LLMDeployments of a tick: the engines' figures, and how old each replica's are. An instant
query answers with what was scraped up to five minutes ago, under the time of asking; only ``timestamp()`` tells when.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire_common.contract.engine import RUNNING
from quire_operator.domain.autoscaling.engine_metrics import NAMES, Point, sample_of
from quire_operator.domain.autoscaling.observation import ReplicaSample

_SPLITS = "engine, finished_reason, part, le, num_gpu_blocks, block_size"
"""Labels that split one figure of one replica. Any other one tells only who scraped it: the largest counts, so that a
replica scraped by two jobs, or by two Prometheus servers of one store, is not counted twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLabels:
    """Which labels name a replica. ``instance``, its address, is used where a series has no pod."""

    namespace: str = "namespace"
    pod: str = "pod"

    def replica_of(self, labels: Mapping[str, str]) -> str | None:
        """``namespace/pod``, else ``host:port``, else None.

        A series with a pod is never told by its address: another pod may have that by now.
        """
        pod = labels.get(self.pod)
        return f"{labels.get(self.namespace, '')}/{pod}" if pod else labels.get("instance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """Where Prometheus is, and how it is asked."""

    url: str
    """Below which /api/v1 is."""
    token_file: Path | None = None
    """Holds a bearer token; read at each query, since such tokens are renewed."""
    ca_file: Path | None = None
    """Certificates that vouch for the server, in place of the system's."""
    labels: ReplicaLabels = ReplicaLabels()


class Series(NamedTuple):
    """One element of an instant vector."""

    labels: Mapping[str, str]
    time: float
    """Of the evaluation, by the clock of Prometheus."""
    value: float


class Told(NamedTuple):
    """What a replica said when it was last scraped."""

    points: list[Point]
    age: float


def figures_query(labels: ReplicaLabels, names: Iterable[str] = NAMES, *, offset: str = "") -> str:
    """The engines' figures, as little of each as tells them apart; ``offset`` says how long ago."""
    wanted, before = "|".join(sorted(names)), f" offset {offset}" if offset else ""
    by_pod = (
        f"max by (__name__, {labels.namespace}, {labels.pod}, {_SPLITS}) "
        f'({{__name__=~"{wanted}",{labels.pod}!=""}}{before})'
    )
    by_address = f'max by (__name__, instance, {_SPLITS}) ({{__name__=~"{wanted}",{labels.pod}=""}}{before})'
    return f"{by_pod} or {by_address}"


def times_query(labels: ReplicaLabels, *, offset: str = "") -> str:
    """When each replica was scraped."""
    before = f" offset {offset}" if offset else ""
    by_pod = f'max by ({labels.namespace}, {labels.pod}) (timestamp({RUNNING}{{{labels.pod}!=""}}{before}))'
    return f'{by_pod} or max by (instance) (timestamp({RUNNING}{{{labels.pod}=""}}{before}))'


def samples(
    figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels, now: float
) -> dict[str, ReplicaSample]:
    """By replica; ``now`` is ours."""
    read = {
        replica: sample_of(told.points, time=now - told.age)
        for replica, told in by_replica(figures, times, labels=labels).items()
    }
    return {replica: sample for replica, sample in read.items() if sample is not None}


def by_replica(figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels) -> dict[str, Told]:
    """Those of which it is known when they were scraped. The age is Prometheus's own: two clocks need not agree."""
    replica_of = labels.replica_of
    ages = {replica_of(series.labels): series.time - series.value for series in times}
    points: dict[str, list[Point]] = {}
    for found, _, value in figures:
        replica = replica_of(found)
        if replica is not None:
            points.setdefault(replica, []).append(Point(found.get("__name__", ""), found, value))
    return {
        replica: Told(points, ages[replica])
        for replica, points in points.items()
        if replica in ages and math.isfinite(ages[replica])
    }
