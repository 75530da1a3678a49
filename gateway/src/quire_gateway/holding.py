"""Requests that wait because no replica of their model can take them: at zero replicas, or while all restart.

Under ``proxy``. Bounded in number, per model, and in time; whoever waits is woken when discovery brings a replica, and
looks again now and then, for a replica that did not answer may answer again without discovery's word.
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
MAX_HELD_BYTES = 96 * 2**20
"""Of request bodies, all models together. The chart gives a gateway 256 MiB of memory for all it does."""
_LOOK_AGAIN_SECONDS = 0.5


class Holding:
    """The waiting room."""

    def __init__(self, fleet: Fleet, options: ProxyOptions, metrics: Metrics) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics
        self._held_bytes = 0

    @contextmanager
    def place(self, pool: Pool, *, size_bytes: int) -> Iterator["Place"]:
        """One request's place; it counts as held only while it waits in it."""
        deadline = monotonic() + self._options.hold_timeout_seconds
        place = Place(self, pool, deadline=deadline, size_bytes=size_bytes)
        try:
            yield place
        finally:
            place.leave()

    def enter(self, model: str, size_bytes: int) -> None:
        """Count one more, or raise ``NoReplica`` where as many wait as may."""
        held = self._metrics.held.get(model, 0)
        if held >= self._options.hold_limit or self._held_bytes + size_bytes > MAX_HELD_BYTES:
            self._metrics.hold_failures.labels(model, "limit").inc()
            raise NoReplica(
                f"no replica of {model} is ready, and {held} requests wait for one already",
                retry_after_seconds=RETRY_AFTER_SECONDS,
            )
        self._metrics.held[model] = held + 1
        self._held_bytes += size_bytes

    def leave(self, model: str, size_bytes: int) -> None:
        self._metrics.held[model] -= 1
        self._held_bytes -= size_bytes

    def is_known(self, pool: Pool) -> bool:
        return self._fleet.pools.get(pool.model) is pool

    def give_up(self, model: str, cause: str | None) -> NoReplica:
        """What to say when time is up."""
        self._metrics.hold_failures.labels(model, "timeout").inc()
        seconds = f"{self._options.hold_timeout_seconds:g}"
        message = f"no replica of {model} became ready within {seconds} s"
        return NoReplica(
            f"{message}; the last one asked: {cause}" if cause else message, retry_after_seconds=RETRY_AFTER_SECONDS
        )


class Place:
    """One request's place in the waiting room."""

    def __init__(self, holding: Holding, pool: Pool, *, deadline: float, size_bytes: int) -> None:
        self._holding, self._pool, self._deadline, self._size_bytes = holding, pool, deadline, size_bytes
        self._inside = False

    async def wait(self, *, cause: str | None) -> None:
        """Until it is worth looking again. Raises when time is up, the room is full, or the model is gone."""
        if not self._inside:
            self._holding.enter(self._pool.model, self._size_bytes)
            self._inside = True
        left = self._deadline - monotonic()
        if left <= 0:
            raise self._holding.give_up(self._pool.model, cause)
        changed = self._pool.changed
        try:
            async with asyncio.timeout(min(left, _LOOK_AGAIN_SECONDS)):
                await changed.wait()
        except TimeoutError:
            pass
        if not self._holding.is_known(self._pool):
            raise UnknownModel(f"the model {self._pool.model!r} is not served any more")

    def leave(self) -> None:
        """It found a replica, or left."""
        if self._inside:
            self._inside = False
            self._holding.leave(self._pool.model, self._size_bytes)
