"""Requests that wait because no replica of their model can serve them: at zero replicas, or while all restart.

Under ``proxy``. The queue is bounded in number per model and in time; ``bodies`` bounds its memory. Requests leave in
the order in which they came, as many as the ready replicas can run at once: a replica that has just started would
otherwise get all of them together. Their time does not end while a replica is known to be starting, as ``quire up``
knows of its own replicas. While no replica can be trusted, the first request tries one every half second,
because a replica that failed may answer again unannounced.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from quire_gateway.config import ProxyOptions
from quire_gateway.errors import NoReplica, UnknownModel
from quire_gateway.fleet import Fleet, Pool
from quire_gateway.metrics import Metrics

RETRY_AFTER_SECONDS = 5
"""The Retry-After if the start-up time of the model's replicas is not known, or has passed."""
_RETRY_SECONDS = 0.5
_START_UPS = 2.0
"""A request waits for at least so many times the usual start-up time, unless the model has a limit of its own."""


class _Line:
    """The requests of one model that wait, in their order."""

    def __init__(self) -> None:
        self.since = monotonic()
        self.waiting: deque[asyncio.Future[None]] = deque()
        self.released = 0
        """Requests that may go on and have not chosen a replica yet."""
        self.timer: asyncio.TimerHandle | None = None


class HoldQueue:
    """The requests of all models that wait for a replica."""

    def __init__(self, fleet: Fleet, options: ProxyOptions, metrics: Metrics) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics
        self._lines: dict[Pool, _Line] = {}

    @contextmanager
    def ticket(self, pool: Pool) -> Iterator["HoldTicket"]:
        """Give one request the right to wait; it counts as held only while it waits."""
        ticket = HoldTicket(self, pool, deadline=monotonic() + self.timeout_seconds(pool))
        try:
            yield ticket
        finally:
            ticket.close()
            self.release(pool)

    def timeout_seconds(self, pool: Pool) -> float:
        """Return how long a request of this model may wait."""
        if pool.hold.timeout_seconds is not None:
            return pool.hold.timeout_seconds
        return max(self._options.hold_timeout_seconds, _START_UPS * (pool.hold.start_up_seconds or 0.0))

    def has_waiting(self, pool: Pool) -> bool:
        """Return whether other requests came first."""
        line = self._lines.get(pool)
        return line is not None and bool(line.waiting)

    def count_in(self, pool: Pool, *, is_retry: bool) -> None:
        """Count one more held request. Raise ``NoReplica`` if the queue is full, unless the request is a retry."""
        held = self._metrics.held.get(pool.model, 0)
        limit = self._options.hold_limit if pool.hold.max_held is None else pool.hold.max_held
        if held >= limit and not is_retry:
            self._metrics.hold_failures.labels(pool.model, "limit").inc()
            raise NoReplica(
                f"no replica of {pool.model} is ready, and the queue is full: {held} requests already wait for one",
                retry_after_seconds=self._retry_after_seconds(pool),
            )
        self._metrics.held[pool.model] = held + 1

    def count_out(self, pool: Pool) -> None:
        self._metrics.held[pool.model] -= 1

    def is_known(self, pool: Pool) -> bool:
        """Return whether the model is still served."""
        return self._fleet.pools.get(pool.model) is pool

    def time_out(self, pool: Pool, cause: str | None) -> NoReplica:
        """Count a request that waited too long, and return its error."""
        self._metrics.hold_failures.labels(pool.model, "timeout").inc()
        known = len(pool.backends)
        state = (
            f"the last replica tried {cause}" if cause else f"{known} run, but are not ready" if known else "none runs"
        )
        message = f"no replica of {pool.model} became ready within {self.timeout_seconds(pool):g} s; {state}"
        return NoReplica(message, retry_after_seconds=self._retry_after_seconds(pool))

    async def turn(self, pool: Pool, *, seconds: float, is_first: bool) -> bool:
        """Wait for a turn to choose a replica; return False when the time is up and no replica is starting."""
        line = self._lines.setdefault(pool, _Line())
        turn = asyncio.get_running_loop().create_future()
        if is_first:
            line.waiting.appendleft(turn)
        else:
            line.waiting.append(turn)
        if line.timer is None:
            self._retry_later(pool, line)
        # Without this, a request that comes while there is room would wait for the next event.
        self._release(pool, line)
        try:
            await asyncio.wait((turn,), timeout=seconds)
            while not turn.done() and pool.awaits_start(monotonic()):
                await asyncio.wait((turn,), timeout=_RETRY_SECONDS)
            return turn.done()
        finally:
            # Nothing is awaited before the request chooses a replica, so it counts as released until then.
            if turn in line.waiting:
                line.waiting.remove(turn)
            else:
                line.released -= 1

    def release(self, pool: Pool) -> None:
        """Let as many requests go on as the replicas of a model can run."""
        line = self._lines.get(pool)
        if line is not None:
            self._release(pool, line)

    def _release(self, pool: Pool, line: _Line) -> None:
        room = pool.room(monotonic()) - line.released if self.is_known(pool) else len(line.waiting)
        for _ in range(min(room, len(line.waiting))):
            self._let_go(line)
        if not line.waiting and not line.released:
            if line.timer is not None:
                line.timer.cancel()
            self._lines.pop(pool, None)

    def _let_go(self, line: _Line) -> None:
        turn = line.waiting.popleft()
        line.released += 1
        if not turn.done():
            turn.set_result(None)

    def _retry_later(self, pool: Pool, line: _Line) -> None:
        line.timer = asyncio.get_running_loop().call_later(_RETRY_SECONDS, self._retry, pool, line)

    def _retry(self, pool: Pool, line: _Line) -> None:
        if line.waiting and not pool.has_trusted(monotonic()):
            self._let_go(line)
        self._release(pool, line)
        if self._lines.get(pool) is line:
            self._retry_later(pool, line)

    def _retry_after_seconds(self, pool: Pool) -> int:
        """Return what is left of the usual start-up time since the first request began to wait."""
        start_up, line = pool.hold.start_up_seconds, self._lines.get(pool)
        if start_up is None:
            return RETRY_AFTER_SECONDS
        left = start_up - (0.0 if line is None else monotonic() - line.since)
        return math.ceil(left) if left > 0 else RETRY_AFTER_SECONDS


class HoldTicket:
    """The right of one request to wait in the queue."""

    def __init__(self, queue: HoldQueue, pool: Pool, *, deadline: float) -> None:
        self._queue, self._pool, self._deadline = queue, pool, deadline
        self._is_held = False
        self.is_renewed = False
        """True if a replica had the request and ended."""

    @property
    def has_time(self) -> bool:
        """True until the request has waited as long as it may."""
        return monotonic() < self._deadline

    def renew(self) -> None:
        """Let a request whose replica ended wait from now on, even in a full queue, and before new requests."""
        self._deadline, self.is_renewed = monotonic() + self._queue.timeout_seconds(self._pool), True

    async def wait(self, *, cause: str | None) -> None:
        """Wait for a turn to choose a replica. Raise when time is up, the queue is full, or the model is gone.

        A request that waited for room at a replica until its time was up goes to the replica's own queue.
        """
        was_held = self._is_held
        if not was_held:
            self._queue.count_in(self._pool, is_retry=self.is_renewed)
            self._is_held = True
        left = self._deadline - monotonic()
        has_turn = (left > 0 or self._pool.awaits_start(monotonic())) and await self._queue.turn(
            self._pool, seconds=max(0.0, left), is_first=was_held or self.is_renewed
        )
        if not self._queue.is_known(self._pool):
            raise UnknownModel(f"the model {self._pool.model!r} is no longer served")
        if not has_turn and (cause is not None or not self._pool.has_trusted(monotonic())):
            raise self._queue.time_out(self._pool, cause)

    def close(self) -> None:
        """End the wait: the request found a replica, or its client left."""
        if self._is_held:
            self._is_held = False
            self._queue.count_out(self._pool)
