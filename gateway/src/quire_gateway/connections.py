"""The connections of clients: a deadline for each request head, a bound on their number, and answers to invalid HTTP.

Between aiohttp's server and ``__main__``. At the bound, the connection that has been idle the longest makes room. If
none is idle, the new one is *surplus*: it gets answers from the open paths only, so that probes still work.
"""

import asyncio
import logging

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from quire_gateway.errors import BadRequest, GatewayError, TooManyConnections, error_response

HEAD_SECONDS = 15.0
_SURPLUS = 64
"""Surplus connections; beyond them a new connection is closed at once."""
_RETRY_AFTER_SECONDS = 2

_log = logging.getLogger(__name__)


class Connections:
    """The connections of all clients. It is the factory of their protocols."""

    def __init__(self, server: web.Server, *, limit: int) -> None:
        self._server, self.limit = server, limit
        self._open: set[Connection] = set()
        self._idle: dict[Connection, None] = {}
        """The connections without a request, the one that has been idle the longest first."""

    def __call__(self) -> "Connection":
        return Connection(self._server, self)

    def opened(self, connection: "Connection") -> bool:
        """Count a new connection, and make room for it; return whether it is surplus."""
        if len(self._open) >= self.limit and self._idle:
            longest = next(iter(self._idle))
            self.closed(longest)
            longest.abort()
        is_surplus = len(self._open) >= self.limit
        if len(self._open) >= self.limit + _SURPLUS:
            connection.abort()
        self._open.add(connection)
        self._idle[connection] = None
        return is_surplus

    def busy(self, connection: "Connection") -> None:
        """Record that a request of the connection runs."""
        self._idle.pop(connection, None)

    def idle(self, connection: "Connection") -> None:
        """Record that the connection waits for its next request."""
        if connection in self._open:
            self._idle[connection] = None

    def closed(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)


class Connection(web.RequestHandler):
    """One connection. It is aborted if a request head takes too long."""

    def __init__(self, server: web.Server, connections: Connections) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]  # no log
        self._connections = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._is_busy = False
        self.is_surplus = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._expect_head()
        self.is_surplus = self._connections.opened(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._head_arrived()
        self._connections.closed(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_busy and self._deadline is None:
            self._expect_head()
        super().data_received(data)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what cannot be read as a request like every other error, and close the connection.

        A stray exception of a handler arrives here, too.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has started")
        if isinstance(exc, HttpProcessingError):
            # The lines after the first one show where in the data the parser stopped.
            reason = (message or "").partition("\n")[0].rstrip(":")
            error: GatewayError = BadRequest(f"this is not a valid HTTP request: {reason}", code="invalid_http")
        else:
            _log.error("request failed: unhandled exception (bug)", exc_info=exc)
            error = GatewayError("internal error; the gateway's log has the details")
        response = error_response(request, error)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; what aiohttp refuses before the application sees it is answered like every other error."""
        if isinstance(resp, web.HTTPException):
            resp = error_response(request, BadRequest(resp.reason), status=resp.status)
        return await super().finish_response(request, resp, start_time)

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def begin(self) -> None:
        """Record that a request has arrived."""
        self._is_busy = True
        self._head_arrived()
        self._connections.busy(self)

    def end(self) -> None:
        """Record that the request was answered."""
        self._is_busy = False
        self._connections.idle(self)

    def _expect_head(self) -> None:
        self._deadline = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.abort)

    def _head_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def track_requests(open_paths: frozenset[str]) -> Middleware:
    """Return a middleware that tells each connection about its requests, and refuses those of surplus connections."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection = request.protocol
        assert isinstance(connection, Connection)
        connection.begin()
        try:
            if connection.is_surplus and request.path not in open_paths:
                raise TooManyConnections(
                    "this gateway has no free connection (--max-connections); try again shortly",
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            return await handler(request)
        finally:
            connection.end()

    return middleware


def is_surplus(request: web.BaseRequest) -> bool:
    """Return whether the connection of a request should be closed after its answer."""
    return isinstance(request.protocol, Connection) and request.protocol.is_surplus
