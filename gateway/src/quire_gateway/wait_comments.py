"""A stream that begins before a replica has answered: comments, which clients ignore, show that it still waits.

Under ``proxy``. Load balancers cut connections that are silent for half a minute or a minute; a replica that starts,
or has a queue, is silent for longer. Other replicas can still be tried. The price is that an error which comes later is
an event instead of a status, so the first comment comes late, and a client may choose another time or none by a header.
"""

import asyncio
from contextlib import suppress

from aiohttp import web

from quire_common.contract.gateway import WAIT_COMMENTS_HEADER
from quire_gateway import headers, sse

_COMMENT = b": waiting for a replica\n\n"
_LEAST_SECONDS, _MOST_SECONDS = 1.0, 300.0


def wait_seconds(request: web.Request, *, is_stream: bool, usual_seconds: float) -> float | None:
    """Return the time between two comments; None if the answer is no stream, or if the time is 0."""
    try:
        seconds = float(request.headers.get(WAIT_COMMENTS_HEADER, usual_seconds))
    except ValueError:
        seconds = usual_seconds
    if not is_stream or not seconds > 0:
        return None
    return min(max(seconds, _LEAST_SECONDS), _MOST_SECONDS)


class WaitComments:
    """The comments of one waiting stream."""

    def __init__(self, request: web.Request, seconds: float, *, request_id: str) -> None:
        self._request, self._seconds, self._request_id = request, seconds, request_id
        self._stopped = asyncio.Event()
        self._response: web.StreamResponse | None = None
        self._task: asyncio.Task[None] | None = None
        # Most streams begin before the first comment is due, so that they need no task.
        self._timer = asyncio.get_running_loop().call_later(seconds, self._start)

    async def stop(self) -> web.StreamResponse | None:
        """End the comments; return the response if it has started."""
        self._timer.cancel()
        self._stopped.set()
        if self._task is not None:
            # A request that is cancelled here must still learn whether its response has started.
            await asyncio.shield(self._task)
        return self._response

    def cancel(self) -> None:
        """End the comments without waiting for one that a slow client has not read."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        # If the client has left, the task of its request is cancelled.
        with suppress(ConnectionError):
            self._response = await self._begin()
            await self._response.write(_COMMENT)
            while not await self._is_stopped_within(self._seconds):
                await self._response.write(_COMMENT)

    async def _is_stopped_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stopped.wait()
        return self._stopped.is_set()

    async def _begin(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={headers.REQUEST_ID: self._request_id, **sse.HEADERS})
        await response.prepare(self._request)
        return response
