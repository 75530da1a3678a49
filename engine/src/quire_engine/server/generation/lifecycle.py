"""The drain: whether new requests are accepted, and which are still being answered.

SIGTERM, Ctrl-C and /admin/drain call ``begin_drain``. Requests that run then may finish; ``drained`` returns when the
last one has, and ``fail_all`` ends the rest.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from quire_engine.errors import RequestError, Unavailable

DRAIN_RETRY_SECONDS = 5


class Failable(Protocol):
    """A request that is being answered."""

    def fail(self, error: RequestError) -> None:
        """End the request with this error."""


class Lifecycle:
    """The requests that are being answered, and the drain. Only for the event loop."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight: set[Failable] = set()
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """The number of requests that are being answered."""
        return len(self._in_flight)

    def check_open(self) -> None:
        """Raise Unavailable during the drain."""
        if self.draining:
            raise Unavailable(
                "this server is draining and accepts no new requests; another replica may accept them",
                code="draining",
                retry_after_seconds=DRAIN_RETRY_SECONDS,
            )

    def track(self, request: Failable) -> Callable[[], None]:
        """Count a request as being answered, until the returned function is called."""
        self._in_flight.add(request)

        def untrack() -> None:
            self._in_flight.discard(request)
            self._changed.set()

        return untrack

    def begin_drain(self) -> None:
        """Accept no new requests from now on."""
        self.draining = True
        self._changed.set()

    async def drained(self) -> None:
        """Return once the drain has started and no request is being answered any more."""
        while not self.draining or self._in_flight:
            self._changed.clear()
            await self._changed.wait()

    def fail_all(self, error: RequestError) -> None:
        """End every request that is still being answered with this error."""
        for request in tuple(self._in_flight):
            request.fail(error)
