"""Which request is tried on which replica after it was lost: pure state, without a clock.

A request is lost if its replica, or the engine process there, died before the client got the first byte. One of the
requests that are lost together may be poisonous, which means that it kills every engine that runs it. Nothing tells
them apart, so each is tried once more, and never together with another lost request on one replica. A request that is
lost in its trial fails. A poisonous request thus kills two engines at most, and the requests that were lost with it get
their answers.

``trial_queue`` waits for turns; replicas refuse a trial while they run one of another gateway.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

_LOST = frozenset({"disconnected", "engine_stopped"})
"""The reasons of attempts that were under way when the replica, or its engine process, died."""
_GONE = frozenset({"unreachable", "unavailable"})
"""The reasons of attempts that a dead replica, or one without an engine process, gives."""


class Step(Enum):
    """The next step for a request whose attempt failed before the first byte."""

    SAME_REPLICA = "try the same replica again at once"
    OTHER_REPLICA = "try another replica"
    TRIAL = "wait for a trial"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Losses:
    """The losses of one request."""

    count: int = 0
    """The deaths that this request may have caused."""
    was_stale: bool = False
    """True if a replica once closed an idle connection as the request was sent over it."""
    is_stale: bool = False
    """True if the last attempt ended so. It was a death if the same replica is gone at the next attempt."""
    was_terminating: bool = False
    """True if a replica once died that was terminating: its end was planned, so it is no reason for a trial."""

    def after(self, reason: str, *, terminating: bool) -> "tuple[Losses, Step]":
        """Return the losses after an attempt failed for ``reason``, and the next step."""
        if reason == "stale" and not self.was_stale:
            return replace(self, was_stale=True, is_stale=True), Step.SAME_REPLICA
        if reason == "moved":
            return self, Step.OTHER_REPLICA
        is_lost = reason in _LOST or reason == "stale" or (self.is_stale and reason in _GONE)
        now = replace(self, is_stale=False)
        if not is_lost:
            return now, Step.TRIAL if self.count else Step.OTHER_REPLICA
        if terminating and not self.was_terminating and not self.count:
            return replace(now, was_terminating=True), Step.OTHER_REPLICA
        return replace(now, count=self.count + 1), Step.FAIL if self.count else Step.TRIAL


class Place(NamedTuple):
    """A ready replica on which a lost request may be tried."""

    id: str
    in_flight: int = 0
    """The gateway's own requests there: if the trial ends the engine, they are lost or cut."""
    is_suspect: bool = False
    """True if it recently failed to answer."""
    is_refusing: bool = False
    """True if it recently refused a trial, for a full queue or for the trial of another gateway."""


def most_trials(num_ready: int) -> int:
    """Return how many replicas may have a trial at once, so that other requests find replicas without one."""
    return max(1, num_ready // 2)


@dataclass(frozen=True, slots=True)
class Trials:
    """The lost requests of one model at one gateway, by number."""

    waiting: tuple[int, ...] = ()
    """In the order in which they are tried."""
    running: Mapping[str, int] = field(default_factory=dict)
    """The request that is tried on each replica that has a trial."""

    def enter(self, request: int) -> "Trials":
        """Add a request that was lost."""
        return replace(self, waiting=(*self.waiting, request))

    def start(self, places: Sequence[Place], *, ask_suspect: bool = False) -> "tuple[Trials, int, str] | None":
        """Start the next trial: return the new state, the request and the replica; None if none can start now.

        The replica with the fewest requests is chosen, because a second death costs the least there. A replica that
        recently failed gets a trial only with ``ask_suspect``, and only if all failed.
        """
        if not self.waiting or len(self.running) >= most_trials(len(places)):
            return None
        trusted = [place for place in places if not place.is_suspect]
        able = trusted if trusted or not ask_suspect else places
        free = [place for place in able if place.id not in self.running and not place.is_refusing]
        if not free:
            return None
        request, *others = self.waiting
        chosen = min(free, key=lambda place: place.in_flight).id
        return Trials(tuple(others), {**self.running, chosen: request}), request, chosen

    def end(self, request: int) -> "Trials":
        """End the trial of a request, if it has one: it was answered, was lost again, or its stream began."""
        return replace(self, running={id_: each for id_, each in self.running.items() if each != request})

    def put_back(self, request: int) -> "Trials":
        """End a trial that the replica refused; the request is the next to be tried."""
        return replace(self.end(request), waiting=(request, *self.waiting))

    def leave(self, request: int) -> "Trials":
        """Remove a request, wherever it is."""
        return replace(self.end(request), waiting=tuple(each for each in self.waiting if each != request))


def avoid(trials: Collection[str], replicas: Collection[str]) -> frozenset[str]:
    """Return the replicas that requests which were never lost should not get: those with a trial, unless all have."""
    avoided = frozenset(trials).intersection(replicas)
    return frozenset() if len(avoided) == len(replicas) else avoided
