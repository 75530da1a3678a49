"""Observations of the replicas of an LLMDeployment during a scenario, and what they show.

The sources are the API server (``Look``), Prometheus and ``quire explain``.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import httpx

from e2e_support import objects
from e2e_support.errors import ApiError
from e2e_support.kube import Kube
from e2e_support.objects import Condition, Pod
from e2e_support.space import LLMDeployment
from e2e_support.timeline.model import ClusterMessage, Steps
from e2e_support.waiting import Polling
from quire_cluster.real_cluster import RealCluster

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One observation. Times are seconds of the given clock."""

    time: float
    desired: int | None
    """The number of requested replicas, or None before the first request."""
    conditions: Mapping[str, Condition]
    """Conditions by type."""
    pods: tuple[Pod, ...]

    def reason(self, type: str) -> str:
        """Return the reason of a condition, or an empty string."""
        found = self.conditions.get(type)
        return "" if found is None else found.reason

    @property
    def serving(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if pod.is_serving)

    @property
    def ready(self) -> int:
        """Return the replicas that may receive new requests."""
        return len(self.serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A value and the time from which it applies."""

    time: float
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A pod that is terminating."""

    pod: str
    uid: str
    seen: float
    """The time of the first observation of the termination."""
    gone: float | None
    """The time at which the pod was gone, or None if that was not observed."""


def look_of(body: JSON, pods: Iterable[Pod], *, time: float) -> Look:
    """Return an observation of an LLMDeployment and its pods."""
    return Look(
        time=time,
        desired=body.get("status", {}).get("desiredReplicas"),
        conditions=objects.conditions(body),
        pods=tuple(pods),
    )


def steps(looks: Sequence[Look], of: Callable[[Look], int | None]) -> list[Step]:
    """Return the changes of a number, starting with its first value; unknown values are skipped."""
    known = [Step(time=look.time, value=value) for look in looks if (value := of(look)) is not None]
    return known[:1] + [after for before, after in pairwise(known) if after.value != before.value]


def desired_steps(looks: Sequence[Look]) -> list[Step]:
    return steps(looks, lambda look: look.desired)


def ready_steps(looks: Sequence[Look]) -> list[Step]:
    return steps(looks, lambda look: look.ready)


def lines(looks: Sequence[Look]) -> list[Steps]:
    """Return desired and ready replicas for a timeline."""
    named = {"desired": desired_steps(looks), "ready": ready_steps(looks)}
    return [Steps(name=name, points=tuple((step.time, step.value) for step in found)) for name, found in named.items()]


def reason_changes(looks: Sequence[Look], *types: str) -> list[ClusterMessage]:
    """Return the changes of reasons of these condition types for a timeline."""
    return [
        ClusterMessage(seconds=after.time, text=f"{type} {after.reason(type)}")
        for type in types
        for before, after in pairwise(looks)
        if before.reason(type) != after.reason(type)
    ]


def during(looks: Sequence[Look], start: float, end: float) -> list[Look]:
    """Return the observations between two times, and the last one before as the initial state."""
    before = [look for look in looks if look.time < start]
    return before[-1:] + [look for look in looks if start <= look.time <= end]


def lowest(found: Sequence[Step]) -> int:
    return min(step.value for step in found)


def first_at(looks: Sequence[Look], is_so: Callable[[Look], bool], *, since: float) -> float | None:
    """Return the time of the first observation for which this is true."""
    return next((look.time for look in looks if look.time >= since and is_so(look)), None)


def endings(looks: Sequence[Look]) -> list[Ending]:
    """Return the terminations that were observed, in order."""
    seen: dict[str, tuple[str, float]] = {}
    last: dict[str, float] = {}
    for look in looks:
        for pod in look.pods:
            last[pod.uid] = look.time
            if pod.is_ending:
                seen.setdefault(pod.uid, (pod.name, look.time))
    times = [look.time for look in looks]
    return [
        Ending(pod=name, uid=uid, seen=time, gone=next((t for t in times if t > last[uid]), None))
        for uid, (name, time) in seen.items()
    ]


class ReplicaWatch(Polling):
    """A context manager whose observations remain available afterwards.

    An API server that does not answer leaves a gap.
    """

    def __init__(self, deployment: LLMDeployment, *, clock: Callable[[], float]) -> None:
        """Store ``clock``, the clock of the traffic, so that both use the same times."""
        super().__init__(self._take)
        self._deployment, self._clock = deployment, clock
        self._looks: list[Look] = []

    def __enter__(self) -> Self:
        super().__enter__()
        self.until(lambda look: True, what="it can be looked at", seconds=30)
        return self

    @property
    def looks(self) -> list[Look]:
        """Return the observations, oldest first."""
        return list(self._looks)

    def until(self, is_so: Callable[[Look], bool], *, what: str, seconds: float) -> None:
        """Wait for an observation for which this is true."""

        def is_newest_so() -> bool:
            self.check()
            return bool(self._looks) and is_so(self._looks[-1])

        self._deployment.until(is_newest_so, what=what, seconds=seconds)

    def _take(self) -> None:
        with suppress(ApiError):  # it may be away; that is a matter of other assertions
            self._looks.append(look_of(self._deployment.body(), self._deployment.pods(), time=self._clock()))


AUTOSCALING = "quire_operator_autoscaling_"


def recorded_decisions(machine: RealCluster, namespace: str) -> list[int]:
    """Return the desired replicas that consecutive leaders decided in the last 15 minutes, each change once.

    Do not use `max` over the operators: Prometheus keeps the last sample of a dead one for five minutes.
    """
    query = f"{AUTOSCALING}desired_replicas{{namespace='{namespace}'}}[15m]"
    url = f"{machine.prometheus_url}/api/v1/query"
    answer = httpx.get(url, params={"query": query}, trust_env=False).raise_for_status().json()
    samples = sorted((time, int(value)) for series in answer["data"]["result"] for time, value in series["values"])
    values = [value for _, value in samples]
    return [value for before, value in zip([None, *values], values, strict=False) if value != before]


_QUIRE = Path(sys.executable).with_name("quire")


def explain(kube: Kube, deployment: LLMDeployment, *, last: int = 10) -> str:
    """Return the screen with this number of decisions."""
    return _run(kube, deployment, "--last", str(last))


def explain_json(kube: Kube, deployment: LLMDeployment) -> JSON:
    """Return the output in JSON."""
    said: JSON = json.loads(_run(kube, deployment, "--json"))
    return said


def _run(kube: Kube, deployment: LLMDeployment, *more: str) -> str:
    command = [str(_QUIRE), "explain", deployment.name, "--namespace", deployment.namespace, *more]
    return kube.output(command, seconds=60)
