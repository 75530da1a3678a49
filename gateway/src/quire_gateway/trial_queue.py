"""Requests that were lost with a replica and wait until they can be tried again; ``trials`` decides their turns.

Under ``proxy``. Each has the time of a held request, counted from its loss, and is counted as held. They are not
bounded in number: they were admitted before, and ``bodies`` bounds their memory.
"""

import asyncio
import math
from collections.abc import Iterator, Set
from contextlib import contextmanager
from itertools import count
from time import monotonic

from quire_gateway.errors import UnknownModel
from quire_gateway.fleet import Backend, Pool
from quire_gateway.hold_queue import HoldQueue
from quire_gateway.metrics import Metrics
from quire_gateway.trials import Place, Trials, avoid

_POLL_SECONDS = 0.25
"""A replica is trusted again, or has room for a trial again, without a message to this gateway."""
_ASK_SUSPECT_SECONDS = 0.5
"""The time between two trials on replicas that recently failed, while there are no others."""


class _Line:
    """The lost requests of one model."""

    def __init__(self) -> None:
        self.trials = Trials()
        self.num_members = 0
        """The requests that were lost and have no complete answer; a resumable stream may be lost later."""
        self.turns: dict[int, asyncio.Future[str]] = {}
        self.tracks: dict[int, str] = {}
        """The track on which each request should stay."""
        self.unsuited: dict[int, Set[str]] = {}
        """The replicas that cannot continue a stream, which grow in number while it is tried."""
        self.refusing_until: dict[str, float] = {}
        self.last_ask = 0.0
        self.timer: asyncio.TimerHandle | None = None


class TrialQueue:
    """The lost requests of all models."""

    def __init__(self, queue: HoldQueue, metrics: Metrics) -> None:
        self._queue, self._metrics = queue, metrics
        self._lines: dict[Pool, _Line] = {}
        self._numbers = count()

    def avoided(self, pool: Pool) -> frozenset[str]:
        """Return the replicas of a model that requests which were never lost should not get."""
        line = self._lines.get(pool)
        return frozenset() if line is None else avoid(line.trials.places, pool.ready_ids())

    @contextmanager
    def enter(self, pool: Pool, *, track: str, together: bool, unsuited: Set[str]) -> Iterator["Trial"]:
        """Queue a request that was lost, until the context ends.

        ``together`` is true for a stream that may go on with others. The replicas in
        ``unsuited``, which may grow meanwhile, get no trial of it.
        """
        line = self._lines.setdefault(pool, _Line())
        number = next(self._numbers)
        line.trials = line.trials.enter(number, together=together)
        line.tracks[number], line.unsuited[number] = track, unsuited
        line.num_members += 1
        deadline = monotonic() + self._queue.timeout_seconds(pool)
        try:
            yield Trial(self, pool, line, number, deadline, together=together)
        finally:
            line.trials = line.trials.leave(number)
            del line.tracks[number], line.unsuited[number]
            line.num_members -= 1
            self._start_trials(pool, line)

    def wake(self, pool: Pool) -> None:
        """Start trials on the replicas that can have one now."""
        line = self._lines.get(pool)
        if line is not None:
            self._start_trials(pool, line)

    async def turn(self, trial: "Trial") -> Backend | None:
        """Wait for a trial; return its replica, or None when the time is up.

        Raise UnknownModel if the model is gone.
        """
        line, pool = trial.line, trial.pool
        self._metrics.held[pool.model] = self._metrics.held.get(pool.model, 0) + 1
        try:
            async with asyncio.timeout(max(0.0, trial.deadline - monotonic())):
                while True:
                    turn = line.turns[trial.number] = asyncio.get_running_loop().create_future()
                    self._start_trials(pool, line)
                    replica = await turn
                    if not self._queue.is_known(pool):
                        raise UnknownModel(f"the model {pool.model!r} is no longer served")
                    if replica in pool.backends:
                        return pool.backends[replica]
                    line.trials = line.trials.put_back(trial.number, together=trial.together)
        except TimeoutError:
            return None
        finally:
            line.turns.pop(trial.number, None)
            self._metrics.held[pool.model] -= 1

    def refused(self, trial: "Trial", replica: str, *, accepts_others: bool) -> None:
        """Record that a replica refused a trial for now, or was lost in it; the request is the next to be tried."""
        line = trial.line
        line.trials = line.trials.put_back(trial.number, together=trial.together)
        if not accepts_others:
            line.refusing_until[replica] = monotonic() + 2 * _POLL_SECONDS
        trial.deadline = min(trial.deadline, monotonic() + self._queue.timeout_seconds(trial.pool))

    def end(self, trial: "Trial") -> None:
        """End the trial of a request that was answered or whose stream begins.

        If that stream is lost again, it has the whole time again.
        """
        trial.deadline = math.inf
        trial.line.trials = trial.line.trials.end(trial.number)
        self._start_trials(trial.pool, trial.line)

    def _start_trials(self, pool: Pool, line: _Line) -> None:
        if not self._queue.is_known(pool):
            for turn in line.turns.values():
                _give(turn, "")
        now = monotonic()
        ask_suspect = now - line.last_ask >= _ASK_SUSPECT_SECONDS
        places = {
            id_: Place(
                id=id_,
                in_flight=backend.in_flight,
                is_suspect=backend.is_suspect(now),
                is_refusing=now < line.refusing_until.get(id_, 0.0),
                room=backend.room(now),
                track=backend.endpoint.track,
            )
            for id_, backend in pool.backends.items()
            if backend.is_ready
        }
        while (
            started := line.trials.start(
                list(places.values()),
                ask_suspect=ask_suspect,
                tracks=line.tracks,
                unsuited={number: frozenset(replicas) for number, replicas in line.unsuited.items()},
            )
        ) is not None:
            line.trials, number, replica = started
            place = places[replica]
            places[replica] = place._replace(in_flight=place.in_flight + 1, room=place.room - 1)
            if pool.backends[replica].is_suspect(now):
                line.last_ask, ask_suspect = now, False
            _give(line.turns[number], replica)
        if line.timer is not None:
            line.timer.cancel()
            line.timer = None
        if line.trials.waiting or line.trials.streams:
            line.timer = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._start_trials, pool, line)
        elif not line.num_members:
            self._lines.pop(pool, None)


def _give(turn: asyncio.Future[str], replica: str) -> None:
    if not turn.done():
        turn.set_result(replica)


class Trial:
    """The place of one lost request in the queue."""

    def __init__(
        self, queue: TrialQueue, pool: Pool, line: _Line, number: int, deadline: float, *, together: bool
    ) -> None:
        self._queue = queue
        self.pool, self.line, self.number, self.deadline = pool, line, number, deadline
        self.together = together
        """True for a stream that may go on with others."""

    async def turn(self) -> Backend | None:
        """Wait until the request may be tried; return the replica, or None when the time is up."""
        return await self._queue.turn(self)

    def refused(self, backend: Backend, *, together: bool, accepts_others: bool) -> None:
        """Record that the replica did not end the request, which is the next to be tried, together or alone.

        A replica that ``accepts_others`` only cannot continue this stream.
        """
        self.together = together
        self._queue.refused(self, backend.endpoint.id, accepts_others=accepts_others)

    def end(self) -> None:
        """End the trial: others may be tried on its replica."""
        self._queue.end(self)
