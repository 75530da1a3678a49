"""A series of observations of an LLMDeployment's replicas, and queries on it. Pure.

``watch`` records the observations; scenarios check conditions that must hold all the time, not only at the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from e2e_support import objects
from e2e_support.objects import Condition, Pod
from e2e_support.timeline.model import ClusterMessage, Steps

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
