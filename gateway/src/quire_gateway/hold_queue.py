"""Requests that wait because no replica of their model can serve them: at zero replicas, or while all restart.

Under ``proxy``. The queue is bounded in number per model and in time; ``bodies`` bounds its memory. A request is woken
when discovery brings a replica, and tries again every half second, because a replica that failed may answer again
unannounced.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic

from quire_gateway.config import ProxyOptions
from quire_gateway.errors import NoReplica, UnknownModel
from quire_gateway.fleet import Fleet, Pool
from quire_gateway.metrics import Metrics

RETRY_AFTER_SECONDS = 5
_RETRY_SECONDS = 0.5


class HoldQueue:
    """The requests of all models that wait for a replica."""

    def __init__(self, fleet: Fleet, options: ProxyOptions, metrics: Metrics) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics

    @contextmanager
    def ticket(self, pool: Pool) -> Iterator["HoldTicket"]:
        """Give one request the right to wait; it counts as held only while it waits."""
        deadline = monotonic() + self._options.hold_timeout_seconds
        ticket = HoldTicket(self, pool, deadline=deadline)
        try:
            yield ticket
        finally:
            ticket.close()

    def count_in(self, model: str) -> None:
        """Count one more held request, or raise ``NoReplica`` if the queue is full."""
        held = self._metrics.held.get(model, 0)
        if held >= self._options.hold_limit:
            self._metrics.hold_failures.labels(model, "limit").inc()
            raise NoReplica(
                f"no replica of {model} is ready, and the queue is full: {held} requests already wait for one",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._metrics.held[model] = held + 1

    def count_out(self, model: str) -> None:
        """Count one held request less."""
        self._metrics.held[model] -= 1

    def is_known(self, pool: Pool) -> bool:
        """Return whether the model is still served."""
        return self._fleet.pools.get(pool.model) is pool

    def time_out(self, model: str, cause: str | None) -> NoReplica:
        """Count a request that waited too long, and return its error."""
        self._metrics.hold_failures.labels(model, "timeout").inc()
        message = f"no replica of {model} became ready within {self._options.hold_timeout_seconds:g} s"
        if cause:
            message += f"; the last replica tried {cause}"
        return NoReplica(message, retry_after_seconds=RETRY_AFTER_SECONDS)


class HoldTicket:
    """The right of one request to wait in the queue."""

    def __init__(self, queue: HoldQueue, pool: Pool, *, deadline: float) -> None:
        self._queue, self._pool, self._deadline = queue, pool, deadline
        self._is_held = False

    async def wait(self, *, cause: str | None) -> None:
        """Wait until a retry makes sense. Raise when time is up, the queue is full, or the model is gone."""
        if not self._is_held:
            self._queue.count_in(self._pool.model)
            self._is_held = True
        left = self._deadline - monotonic()
        if left <= 0:
            raise self._queue.time_out(self._pool.model, cause)
        changed = self._pool.changed
        try:
            async with asyncio.timeout(min(left, _RETRY_SECONDS)):
                await changed.wait()
        except TimeoutError:
            pass
        if not self._queue.is_known(self._pool):
            raise UnknownModel(f"the model {self._pool.model!r} is no longer served")

    def close(self) -> None:
        """End the wait: the request found a replica, or its client left."""
        if self._is_held:
            self._is_held = False
            self._queue.count_out(self._pool.model)
