"""The progress of a download over HTTP, on the port that the engine of the same pod will use.

The operator reads it from the pod's address, as it reads metrics later. So a download needs no permission to write to
the API server. The server is part of ``quire-fetch --progress-port`` and knows two numbers, no credentials and no
names.
"""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from quire_common.contract.engine import PROGRESS_PATH
from quire_engine.fetch.remote_files import Say

_REQUEST_SECONDS = 5.0


class Latest:
    """The bytes that have arrived, and all bytes; unknown until the files have been listed."""

    def __init__(self) -> None:
        self.state: tuple[int, int] | None = None

    def __call__(self, done: int, total: int) -> None:
        self.state = done, total


@contextmanager
def served(progress: Latest, port: int | None, *, say: Say) -> Iterator[int | None]:
    """Serve the progress while the context is open, and return the port. A download goes on without it."""
    try:
        server = None if port is None else _Server(progress, port)
    except OSError as error:
        say(f"progress is not served: port {port}: {error.strerror}")
        server = None
    if server is None:
        yield None
        return
    thread = Thread(target=server.serve_forever, name="progress", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, progress: Latest, port: int) -> None:
        self.progress = progress
        if socket.has_dualstack_ipv6():
            self.address_family = socket.AF_INET6
        super().__init__(("", port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            with suppress(OSError):
                self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "", int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    timeout = _REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        state = self.server.progress.state
        if self.path != PROGRESS_PATH or state is None:
            self.send_error(HTTPStatus.NOT_FOUND if self.path != PROGRESS_PATH else HTTPStatus.SERVICE_UNAVAILABLE)
            return
        body = json.dumps({"done": state[0], "total": state[1]}).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: the operator asks every few seconds."""
