"""An LLMDeployment's replicas as they were at one time after another, and what such a series tells. Pure.

``watch`` takes the looks; scenarios ask of them what must have been so all along, not only in the end.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from e2e_support import objects
from e2e_support.objects import Condition, Pod
from e2e_support.timeline.model import Steps, Told

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look. Times are seconds of the clock that the watch was given."""

    time: float
    desired: int | None
    """Replicas asked for; None before anybody asked."""
    conditions: Mapping[str, Condition]
    """By type."""
    pods: tuple[Pod, ...]

    def reason(self, type: str) -> str:
        """Of a condition; empty while there is none."""
        found = self.conditions.get(type)
        return "" if found is None else found.reason

    @property
    def serving(self) -> tuple[Pod, ...]:
        return tuple(pod for pod in self.pods if pod.is_serving)

    @property
    def ready(self) -> int:
        """Those that new requests may go to."""
        return len(self.serving)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """From this time on it was this number."""

    time: float
    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A pod that was asked to end."""

    pod: str
    uid: str
    seen: float
    """When that was first seen."""
    gone: float | None
    """When there was no such pod any more; None if that was not seen."""


def look_of(body: JSON, pods: Iterable[Pod], *, time: float) -> Look:
    """From an LLMDeployment and its pods."""
    return Look(
        time=time,
        desired=body.get("status", {}).get("desiredReplicas"),
        conditions=objects.conditions(body),
        pods=tuple(pods),
    )


def steps(looks: Sequence[Look], of: Callable[[Look], int | None]) -> list[Step]:
    """The changes of a number, its first value among them; looks that do not know it are passed over."""
    known = [Step(time=look.time, value=value) for look in looks if (value := of(look)) is not None]
    return known[:1] + [after for before, after in pairwise(known) if after.value != before.value]


def desired_steps(looks: Sequence[Look]) -> list[Step]:
    return steps(looks, lambda look: look.desired)


def ready_steps(looks: Sequence[Look]) -> list[Step]:
    return steps(looks, lambda look: look.ready)


def lines(looks: Sequence[Look]) -> list[Steps]:
    """Desired and ready, for a timeline."""
    named = {"desired": desired_steps(looks), "ready": ready_steps(looks)}
    return [Steps(name=name, points=tuple((step.time, step.value) for step in found)) for name, found in named.items()]


def told(looks: Sequence[Look], *types: str) -> list[Told]:
    """When conditions of these types came to another reason, for a timeline."""
    return [
        Told(seconds=after.time, text=f"{type} {after.reason(type)}")
        for type in types
        for before, after in pairwise(looks)
        if before.reason(type) != after.reason(type)
    ]


def during(looks: Sequence[Look], start: float, end: float) -> list[Look]:
    """Those between two times, and the last one before, which says how things stood at the start."""
    before = [look for look in looks if look.time < start]
    return before[-1:] + [look for look in looks if start <= look.time <= end]


def lowest(found: Sequence[Step]) -> int:
    return min(step.value for step in found)


def first_at(looks: Sequence[Look], is_so: Callable[[Look], bool], *, since: float) -> float | None:
    """When it was first seen to be so."""
    return next((look.time for look in looks if look.time >= since and is_so(look)), None)


def endings(looks: Sequence[Look]) -> list[Ending]:
    """Of the pods that were asked to end while somebody looked, in that order."""
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
