"""uvicorn's HTTP protocol with two bounds it lacks: how large a request's head may be, and how long it may take.

Bodies are bounded in ``body``; this is for what comes before any route is known.
"""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CERTIFIED = "client_certificate"
"""In the state of requests whose client showed a certificate that TLS trusts."""

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0

_MESSAGE = (
    b'{"error":{"message":"headers are limited to 64 KiB","type":"invalid_request_error","param":null,"code":null}}'
)
_REFUSAL = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_MESSAGE), _MESSAGE)
)


class BoundedHttpProtocol(HttpToolsProtocol):
    _head_bytes = 0
    """Of the head that is being read, in reads that brought nothing else."""
    _in_head = True
    """Between the end of one request and the end of the next one's head."""
    _head_ended = False
    _head_timer: asyncio.TimerHandle | None = None
    _certified = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certified = tls is not None and bool(tls.getpeercert())
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_in_head = self._in_head
        if began_in_head and self._head_timer is None:
            self._expect_head()
        self._head_ended = False
        super().data_received(data)
        if began_in_head and not self._head_ended:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.write(_REFUSAL)
                self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._certified:
            self.scope["state"][CERTIFIED] = True

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_ended = True
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._give_up)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
