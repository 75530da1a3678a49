"""The listening socket, and uvicorn's HTTP protocol with three bounds that it lacks.

The socket is bound before anything slow, so that a port in use is reported at once.
"""

import asyncio
import errno
import re
import socket
import stat
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from quire_engine.api.problems import error_body
from quire_engine.config import ServerOptions
from quire_engine.errors import AddressError, InvalidRequest

_BACKLOG = 2048


def listener_of(options: ServerOptions) -> socket.socket:
    """Return the listening socket that the options name. Raises AddressError."""
    return listen(options.host, options.port) if options.uds is None else listen_unix(options.uds)


def listen_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket, which replaces one that an ended process left there. Raises AddressError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            path.unlink()
        listener.bind(str(path))
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        in_use = error.errno == errno.EADDRINUSE
        reason = "the path is in use, or is not a socket" if in_use else error.strerror or str(error)
        raise AddressError(f"cannot listen on --uds {path}: {reason}") from error
    listener.setblocking(False)
    return listener


def _is_left_behind(path: Path) -> bool:
    if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises AddressError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AddressError(f"--host {host} is not an address of this machine: {reason}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise AddressError(_explanation(error, host, port)) from error
    listener.setblocking(False)
    return listener


def _explanation(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; choose another one with --port (0 picks a free one)"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges that this process does not have; choose --port 1024 or higher"
    if error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host} is not an address of this machine"
    return f"cannot listen on {host} port {port}: {error.strerror}"


CERTIFIED = "client_certificate"
"""The key in a request's state that marks a client with a certificate that TLS trusts."""

MAX_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 60.0
"""A client that reads nothing for this time is disconnected, and the unsent part of its response is dropped."""

_TOO_LARGE = InvalidRequest(f"headers are limited to {MAX_HEAD_BYTES // 1024} KiB")
_NOT_HTTP = InvalidRequest("this is not an HTTP/1.1 request", code="invalid_http")


def _refusal(status: bytes, error: InvalidRequest) -> bytes:
    body = error_body(error)
    return b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


_UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
_UNDECIDED = re.compile(rb"\r(?:\n(?:\r|u(?:p(?:g(?:r(?:a(?:de?)?)?)?)?)?)?)?\Z", re.IGNORECASE)
"""The start of what may become an upgrade offer, or the end of the head, with the next bytes."""
_UNDECIDED_BYTES = 9


def _without_upgrade(data: bytes) -> tuple[bytes, bytes]:
    """Return the data without an offer to upgrade, and the bytes to read again together with the next ones.

    HTTP lets a server ignore an offer of HTTP/2 or WebSocket; the parser would ignore the body instead.
    """
    end = data.find(b"\r\n\r\n")
    if end >= 0:
        return _UPGRADE.sub(b"\r\nx-upgrade:", data[:end]) + data[end:], b""
    undecided = _UNDECIDED.search(data, max(0, len(data) - _UNDECIDED_BYTES))
    decided = len(data) if undecided is None else undecided.start()
    return _UPGRADE.sub(b"\r\nx-upgrade:", data[:decided]), data[decided:]


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection, with bounds on its request heads and on its unread responses."""

    _head_bytes = 0
    """The bytes of the current head, from reads that contained nothing else."""
    _read_bytes = 0
    """The bytes of the current read."""
    _in_head = True
    """True between the end of one request and the end of the next one's head."""
    _head_ended = False
    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _undecided = b""
    _certified = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        tls = transport.get_extra_info("ssl_object")
        self._certified = tls is not None and bool(tls.getpeercert())
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_watching_unread()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began_in_head = self._in_head
        if began_in_head and self._head_timer is None:
            self._expect_head()
        if began_in_head:
            data, self._undecided = _without_upgrade(self._undecided + data)
        self._head_ended = False
        self._read_bytes = len(data)
        super().data_received(data)
        if began_in_head and not self._head_ended:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_refusal(b"431 Request Header Fields Too Large", _TOO_LARGE))

    def send_400_response(self, msg: str) -> None:
        if self._in_head and self._head_bytes + self._read_bytes > MAX_HEAD_BYTES:
            self._refuse(_refusal(b"431 Request Header Fields Too Large", _TOO_LARGE))
        else:
            self._refuse(_refusal(b"400 Bad Request", _NOT_HTTP))

    def _refuse(self, answer: bytes) -> None:
        # In the middle of another response the client would read it as a part of that one.
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            self.transport.write(answer)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._certified:
            self.scope["state"][CERTIFIED] = True

    def on_headers_complete(self) -> None:
        if len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers]) > MAX_HEAD_BYTES:
            raise ValueError("the parser turns this into a call of send_400_response")
        self._in_head = False
        self._head_ended = True
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True

    # --- unread responses ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        self._stop_watching_unread()
        super().resume_writing()

    def _watch_unread(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._unread_timer = self.loop.call_later(UNREAD_SECONDS, self._drop_unread, unread)

    def _drop_unread(self, before: int) -> None:
        # Closing would wait for the client, so the connection is aborted.
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
        else:
            self.transport.abort()

    def _stop_watching_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    # --- the time of a head ---

    def _expect_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._close_slow)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_slow(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
