"""The queries to Prometheus, and the conversion of its answers to samples. Pure.

``adapters/metrics/prometheus`` sends them. Two instant queries serve all LLMDeployments of a tick: the engines'
metrics, and the time of each replica's scrape. An instant query returns values that were scraped up to five minutes ago
with the time of the query; only ``timestamp()`` returns the time of the scrape.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from quire_common.contract.engine import RUNNING
from quire_common.metrics_page import Point
from quire_operator.domain.autoscaling.engine_metrics import NAMES, sample_of
from quire_operator.domain.autoscaling.observation import ReplicaSample

_SPLITS = "engine, finished_reason, part, le, num_gpu_blocks, block_size"
"""The labels that split one value of one replica. Other labels only name the scraper, and the largest value counts. So
a replica that two jobs or two Prometheus servers of one store scrape is not counted twice.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLabels:
    """The labels that identify a replica. ``instance``, its address, is used if a series has no pod."""

    namespace: str = "namespace"
    pod: str = "pod"

    def replica_of(self, labels: Mapping[str, str]) -> str | None:
        """Return ``namespace/pod``, else ``host:port``, else None.

        A series with a pod is never identified by its address, because another pod may have that address by now.
        """
        pod = labels.get(self.pod)
        return f"{labels.get(self.namespace, '')}/{pod}" if pod else labels.get("instance")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrometheusOptions:
    """The address of Prometheus and the credentials for it."""

    url: str
    """The URL in front of /api/v1."""
    token_file: Path | None = None
    """A file with a bearer token. It is read at each query, because such tokens are renewed."""
    ca_file: Path | None = None
    """Certificates that replace the system's for the verification of the server."""
    labels: ReplicaLabels = ReplicaLabels()


class Series(NamedTuple):
    """One element of an instant vector."""

    labels: Mapping[str, str]
    time: float
    """The time of the evaluation, by the clock of Prometheus."""
    value: float


class Told(NamedTuple):
    """The metrics of a replica in its last scrape, and their age in seconds."""

    points: list[Point]
    age: float


def figures_query(labels: ReplicaLabels, names: Iterable[str] = NAMES, *, offset: str = "") -> str:
    """Return the query for the engines' metrics with only the labels that identify them, ``offset`` ago."""
    wanted, before = "|".join(sorted(names)), f" offset {offset}" if offset else ""
    by_pod = (
        f"max by (__name__, {labels.namespace}, {labels.pod}, {_SPLITS}) "
        f'({{__name__=~"{wanted}",{labels.pod}!=""}}{before})'
    )
    by_address = f'max by (__name__, instance, {_SPLITS}) ({{__name__=~"{wanted}",{labels.pod}=""}}{before})'
    return f"{by_pod} or {by_address}"


def times_query(labels: ReplicaLabels, *, offset: str = "") -> str:
    """Return the query for the time of each replica's scrape."""
    before = f" offset {offset}" if offset else ""
    by_pod = f'max by ({labels.namespace}, {labels.pod}) (timestamp({RUNNING}{{{labels.pod}!=""}}{before}))'
    return f'{by_pod} or max by (instance) (timestamp({RUNNING}{{{labels.pod}=""}}{before}))'


def samples(
    figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels, now: float
) -> dict[str, ReplicaSample]:
    """Return the samples by replica. ``now`` is this process's time."""
    read = {
        replica: sample_of(told.points, time=now - told.age)
        for replica, told in by_replica(figures, times, labels=labels).items()
    }
    return {replica: sample for replica, sample in read.items() if sample is not None}


def by_replica(figures: Iterable[Series], times: Iterable[Series], *, labels: ReplicaLabels) -> dict[str, Told]:
    """Return the metrics by replica, if the time of their scrape is known.

    The age is computed with Prometheus' clock only, because the two clocks may differ.
    """
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
