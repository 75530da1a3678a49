"""Which request is tried on which replica after it was lost: pure state, without a clock.

A request is lost if its replica, or the engine process there, died before the client got the first byte. One of the
requests that are lost together may be poisonous, which means that it kills every engine that runs it. Nothing tells
them apart, so each is tried once more, and never together with another lost request on one replica. A request that is
lost in its trial fails. A poisonous request thus kills two engines at most, and the requests that were lost with it get
their answers.

A stream that already had tokens is a weaker suspect: its prompt and many steps harmed no engine. So the streams of a
replica go on together first, as many as another replica has room for. If that replica dies too, each of them is a
suspect and is tried alone. A poisonous stream thus kills three engines at most.

``trial_queue`` waits for turns; replicas refuse a trial while they run one of another gateway.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from quire_common.contract.gateway import STABLE

_LOST = frozenset({"disconnected", "engine_stopped"})
"""The reasons of attempts that were under way when the replica, or its engine process, died."""
_MOST_LOSSES, _MOST_LOSSES_OF_STREAMS = 2, 3
"""A request that was lost so many times fails."""
_NO_NAMES: Mapping[int, str] = MappingProxyType({})
_NO_SETS: Mapping[int, frozenset[str]] = MappingProxyType({})
_GONE = frozenset({"unreachable", "unavailable"})
"""The reasons of attempts that a dead replica, or one without an engine process, gives."""


class Step(Enum):
    """The next step for a request whose attempt failed before the first byte."""

    SAME_REPLICA = "try the same replica again at once"
    OTHER_REPLICA = "try another replica"
    RESUME = "wait for a trial together with other streams"
    TRIAL = "wait for a trial alone"
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

    def after(self, reason: str, *, terminating: bool, has_tokens: bool = False) -> "tuple[Losses, Step]":
        """Return the losses after an attempt failed for ``reason``, and the next step.

        ``has_tokens`` is true for a stream that another replica can continue after its first tokens.
        """
        if reason == "stale" and not self.was_stale:
            return replace(self, was_stale=True, is_stale=True), Step.SAME_REPLICA
        if reason == "moved":
            return self, Step.OTHER_REPLICA
        is_lost = reason in _LOST or reason == "stale" or (self.is_stale and reason in _GONE)
        now = replace(self, is_stale=False)
        if not is_lost:
            return now, now.trial(has_tokens=has_tokens) if self.count else Step.OTHER_REPLICA
        if terminating and not self.was_terminating and not self.count:
            return replace(now, was_terminating=True), Step.OTHER_REPLICA
        now = replace(now, count=self.count + 1)
        most = _MOST_LOSSES_OF_STREAMS if has_tokens else _MOST_LOSSES
        return now, Step.FAIL if now.count >= most else now.trial(has_tokens=has_tokens)

    def trial(self, *, has_tokens: bool) -> Step:
        """Return the kind of trial that the request needs: a stream that was lost only once has company."""
        return Step.RESUME if has_tokens and self.count <= 1 else Step.TRIAL


class Place(NamedTuple):
    """A ready replica on which a lost request may be tried."""

    id: str
    in_flight: int = 0
    """The gateway's own requests there: if the trial ends the engine, they are lost or cut."""
    is_suspect: bool = False
    """True if it recently failed to answer."""
    is_refusing: bool = False
    """True if it recently refused a trial, for a full queue or for the trial of another gateway."""
    room: int = 0
    """The requests that it can run in addition."""
    track: str = STABLE


def most_trials(num_ready: int) -> int:
    """Return how many replicas may have a trial at once, so that other requests find replicas without one."""
    return max(1, num_ready // 2)


@dataclass(frozen=True, slots=True)
class Trials:
    """The lost requests of one model at one gateway, by number."""

    waiting: tuple[int, ...] = ()
    """The requests that are tried alone, in this order."""
    running: Mapping[str, int] = field(default_factory=dict)
    """The request that is tried alone on each replica that has such a trial."""
    streams: tuple[int, ...] = ()
    """The streams that wait to go on together."""
    resuming: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The streams that are tried together on each replica that has any."""

    @property
    def places(self) -> frozenset[str]:
        """The replicas that have a trial."""
        return frozenset((*self.running, *self.resuming))

    def enter(self, request: int, *, together: bool = False) -> "Trials":
        """Add a request that was lost; ``together`` for a stream that may go on with others."""
        if together:
            return replace(self, streams=(*self.streams, request))
        return replace(self, waiting=(*self.waiting, request))

    def start(
        self,
        places: Sequence[Place],
        *,
        ask_suspect: bool = False,
        tracks: Mapping[int, str] = _NO_NAMES,
        unsuited: Mapping[int, frozenset[str]] = _NO_SETS,
    ) -> "tuple[Trials, int, str] | None":
        """Start the next trial: return the new state, the request and the replica; None if none can start now.

        The replica with the fewest requests is chosen, because a second death costs the least there. A replica that
        recently failed gets a trial only with ``ask_suspect``, and only if all failed. A request stays on the track
        that ``tracks`` names while a replica of it can be asked; ``unsuited`` names the replicas that cannot serve it.
        """
        trusted = [place for place in places if not place.is_suspect]
        able = trusted if trusted or not ask_suspect else places
        may_add = len(self.places) < most_trials(len(places))
        streams, seen = frozenset(self.streams), set[tuple[bool, str | None, frozenset[str]]]()
        for request in (*self.streams, *self.waiting):
            together, track = request in streams, tracks.get(request)
            barred = unsuited.get(request, frozenset())
            if (together, track, barred) in seen:
                continue
            seen.add((together, track, barred))
            suited = [place for place in able if place.id not in barred]
            own = [place for place in suited if place.track == track] or suited
            free = [place for place in own if self._is_free(place, together=together, may_add=may_add)]
            if free:
                chosen = min(free, key=lambda place: place.in_flight).id
                return self._started(request, chosen, together=together), request, chosen
        return None

    def _is_free(self, place: Place, *, together: bool, may_add: bool) -> bool:
        """Return whether a request may start there: alone, or together while there is room."""
        if place.is_refusing or place.id in self.running:
            return False
        if place.id in self.resuming:
            return together and place.room > 0
        return may_add

    def _started(self, request: int, place: str, *, together: bool) -> "Trials":
        left = self.leave(request)
        if together:
            return replace(left, resuming={**left.resuming, place: left.resuming.get(place, frozenset()) | {request}})
        return replace(left, running={**left.running, place: request})

    def end(self, request: int) -> "Trials":
        """End the trial of a request, if it has one: it was answered, was lost again, or its stream began."""
        others = {id_: members - {request} for id_, members in self.resuming.items()}
        return replace(
            self,
            running={id_: each for id_, each in self.running.items() if each != request},
            resuming={id_: members for id_, members in others.items() if members},
        )

    def put_back(self, request: int, *, together: bool = False) -> "Trials":
        """End a trial that the replica refused or that another one must follow; the request is the next to be tried."""
        left = self.leave(request)
        if together:
            return replace(left, streams=(request, *left.streams))
        return replace(left, waiting=(request, *left.waiting))

    def leave(self, request: int) -> "Trials":
        """Remove a request, wherever it is."""
        return replace(
            self.end(request),
            waiting=tuple(each for each in self.waiting if each != request),
            streams=tuple(each for each in self.streams if each != request),
        )


def avoid(trials: Collection[str], replicas: Collection[str]) -> frozenset[str]:
    """Return the replicas that requests which were never lost should not get: those with a trial, unless all have."""
    avoided = frozenset(trials).intersection(replicas)
    return frozenset() if len(avoided) == len(replicas) else avoided
