"""Whether new requests are taken, and who is still being answered: the drain.

``begin_drain`` is called by SIGTERM, Ctrl-C or /admin/drain. What runs then may finish; ``drained`` tells when the last
one has, and ``give_up`` ends what is left.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire_engine.errors import RequestError, Unavailable

DRAIN_RETRY_SECONDS = 5


class InFlight(Protocol):
    def fail(self, error: RequestError) -> None:
        """End it, telling its client this."""


class Lifecycle:
    """Used from the event loop only."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight: set[InFlight] = set()
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def check_open(self) -> None:
        if self.draining:
            raise Unavailable(
                "this server is draining and takes no new requests; another replica may",
                code="draining",
                retry_after_seconds=DRAIN_RETRY_SECONDS,
            )

    def track(self, request: InFlight) -> Callable[[], None]:
        """Count it as being answered, until the function returned is called."""
        self._in_flight.add(request)

        def untrack() -> None:
            self._in_flight.discard(request)
            self._changed.set()

        return untrack

    def begin_drain(self) -> None:
        self.draining = True
        self._changed.set()

    async def drained(self) -> None:
        """Returns when the drain has begun and nothing is being answered any more."""
        while not self.draining or self._in_flight:
            self._changed.clear()
            await self._changed.wait()

    def give_up(self, error: RequestError) -> None:
        for request in tuple(self._in_flight):
            request.fail(error)
