"""Typed views of Kubernetes objects: pods, events, conditions. Pure functions of JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

JSON = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """The properties of a pod that scenarios use."""

    name: str
    namespace: str
    uid: str
    node: str | None
    ip: str | None
    phase: str
    is_ready: bool
    is_ending: bool
    restarts: int
    revision: str
    """The template hash, equal for pods of one revision."""
    states: tuple[str, ...]
    """The state of each container that is not ready."""

    @property
    def replica(self) -> str:
        """Return the name of a replica as reported by the gateway."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_serving(self) -> bool:
        return self.is_ready and not self.is_ending


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    type: str
    status: str
    reason: str
    message: str
    changed: datetime
    generation: int

    @property
    def is_true(self) -> bool:
        return self.status == "True"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    kind: str
    """The object that the event is about."""
    name: str
    type: str
    """Normal or Warning."""
    reason: str
    message: str
    count: int
    time: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    ip: str | None
    is_ready: bool
    is_schedulable: bool
    is_fake: bool
    """True for a simulated node of kwok, whose pods run nothing."""


def pod(body: JSON) -> Pod:
    metadata, status = body["metadata"], body.get("status", {})
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    return Pod(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata["uid"],
        node=body.get("spec", {}).get("nodeName"),
        ip=status.get("podIP"),
        phase=status.get("phase", "Unknown"),
        is_ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])),
        is_ending="deletionTimestamp" in metadata,
        restarts=sum(container.get("restartCount", 0) for container in containers),
        revision=metadata.get("labels", {}).get("pod-template-hash", ""),
        states=tuple(_states(status, containers)),
    )


def conditions(body: JSON) -> dict[str, Condition]:
    """Return the conditions by type."""
    return {
        found["type"]: Condition(
            type=found["type"],
            status=found["status"],
            reason=found.get("reason", ""),
            message=found.get("message", ""),
            changed=datetime.fromisoformat(found["lastTransitionTime"]),
            generation=found.get("observedGeneration", 0),
        )
        for found in body.get("status", {}).get("conditions", [])
    }


def event(body: JSON) -> Event:
    about, series = body.get("involvedObject", {}), body.get("series") or {}
    times = (series.get("lastObservedTime"), body.get("lastTimestamp"), body.get("eventTime"), body.get("metadata", {}))
    time = next((time for time in times[:3] if time), times[3].get("creationTimestamp", ""))
    return Event(
        kind=about.get("kind", ""),
        name=about.get("name", ""),
        type=body.get("type", ""),
        reason=body.get("reason", ""),
        message=body.get("message", ""),
        count=series.get("count") or body.get("count") or 1,
        time=time,
    )


def node(body: JSON) -> Node:
    metadata, status = body["metadata"], body.get("status", {})
    addresses = {address["type"]: address["address"] for address in status.get("addresses", [])}
    return Node(
        name=metadata["name"],
        ip=addresses.get("InternalIP"),
        is_ready=any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", [])),
        is_schedulable=not body.get("spec", {}).get("unschedulable", False),
        is_fake="kwok.x-k8s.io/node" in metadata.get("annotations", {}),
    )


def in_order(events: Sequence[Event]) -> list[Event]:
    """Return the events, oldest first."""
    return sorted(events, key=lambda event: event.time)


def _states(status: JSON, containers: Sequence[JSON]) -> Iterator[str]:
    for found in status.get("conditions", []):
        if found["type"] == "PodScheduled" and found["status"] != "True":
            yield f"{found.get('reason', 'not scheduled')}: {found.get('message', '')}"
    for container in containers:
        if not container.get("ready"):
            yield from _state(container)


def _state(container: JSON) -> Iterator[str]:
    state, last = container.get("state", {}), container.get("lastState", {})
    for word in ("waiting", "running", "terminated"):
        if word in state and not (word == "terminated" and state[word].get("exitCode") == 0):
            yield f"{container['name']} {word}{_why(state[word])}"
    if "terminated" in last:
        yield f"{container['name']} ended before{_why(last['terminated'])}"


def _why(state: JSON) -> str:
    code = f"code {state['exitCode']}" if "exitCode" in state else ""
    known = [part for part in (state.get("reason", ""), code, state.get("message", "").strip()) if part]
    return f" ({': '.join(known)})" if known else ""
