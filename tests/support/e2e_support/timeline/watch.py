"""A thread that polls the cluster while traffic flows and records changes.

A failed poll (no API server) is a gap, which the plot shows; it never ends a scenario.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from e2e_support import objects
from e2e_support.errors import E2EError
from e2e_support.space import LLMDeployment
from e2e_support.timeline.model import Blind, ClusterMessage, Steps
from e2e_support.waiting import EVERY_SECONDS, Polling


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The result of one poll."""

    replicas: Mapping[str, float] = field(default_factory=dict)
    states: Mapping[str, str] = field(default_factory=dict)
    """Values that are recorded when they change, such as a condition."""
    events: Mapping[str, str] = field(default_factory=dict)
    """Messages that are recorded once, by their identity."""


class ClusterWatch(Polling):
    """A context manager that uses the clock of the traffic: `ClusterWatch(look, traffic.now)`."""

    def __init__(self, look: Callable[[], Sight], clock: Callable[[], float], *, every: float = EVERY_SECONDS) -> None:
        super().__init__(self._take, every=every)
        self._look, self._clock = look, clock
        self._seen = _Seen()

    @property
    def replicas(self) -> list[Steps]:
        return [Steps(name=name, points=tuple(points)) for name, points in self._seen.replicas.items()]

    @property
    def messages(self) -> list[ClusterMessage]:
        return list(self._seen.messages)

    @property
    def blind(self) -> list[Blind]:
        return list(self._seen.blind)

    def _take(self) -> None:
        began = self._clock()
        try:
            self._seen.take(self._look(), self._clock())
        except E2EError:
            self._seen.nothing(began, self._clock())


class _Seen:
    """The changes from poll to poll, without clock and thread."""

    def __init__(self) -> None:
        self.replicas: dict[str, list[tuple[float, float]]] = {}
        self.messages: list[ClusterMessage] = []
        self.blind: list[Blind] = []
        self._states: dict[str, str] = {}
        self._events: set[str] | None = None
        """The known messages, or None before the first poll, whose messages are old."""
        self._is_blind = False

    def take(self, sight: Sight, now: float) -> None:
        for name, value in sight.replicas.items():
            points = self.replicas.setdefault(name, [])
            if not points or points[-1][1] != value:
                points.append((now, value))
        for name, state in sight.states.items():
            if self._states.get(name, state) != state:
                self.messages.append(ClusterMessage(seconds=now, text=f"{name} {state}"))
            self._states[name] = state
        if self._events is not None:
            new = [text for key, text in sight.events.items() if key not in self._events]
            self.messages += [ClusterMessage(seconds=now, text=text) for text in new]
        self._events = (self._events or set()) | sight.events.keys()
        self._is_blind = False

    def nothing(self, began: float, now: float) -> None:
        """Record a failed poll. Consecutive failures form one gap."""
        if self._is_blind:
            began = self.blind.pop().start
        self.blind.append(Blind(start=began, end=now))
        self._is_blind = True


def sight_of(*deployments: LLMDeployment) -> Callable[[], Sight]:
    """Poll LLMDeployments: desired and ready replicas, conditions, and events about them and their pods."""

    def look() -> Sight:
        replicas: dict[str, float] = {}
        states: dict[str, str] = {}
        events: dict[str, str] = {}
        for deployment in deployments:
            body, name = deployment.body(), deployment.name
            replicas |= {f"{name} {word}": count for word, count in _replicas(body.get("status", {})).items()}
            for condition in objects.conditions(body).values():
                states[f"{name} {condition.type}"] = f"{condition.status} ({condition.reason})"
            for event in deployment.events():
                key = f"{event.name} {event.reason} {event.count} {event.message}"
                events[key] = f"{event.name}: {event.reason}: {event.message}"
        return Sight(replicas=replicas, states=states, events=events)

    return look


def _replicas(status: Mapping[str, Any]) -> dict[str, float]:
    counts = {"desired": status.get("desiredReplicas"), "ready": status.get("readyReplicas")}
    return {word: float(count) for word, count in counts.items() if count is not None}
