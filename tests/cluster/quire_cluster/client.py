"""A minimal API client for the tests' infrastructure: one JSON request with the standard library.

The code under test uses the project's real clients.
"""

import http.client
import json
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from quire_cluster.certificates import KeyPair
from quire_cluster.kubeconfig import Server
from quire_cluster.tls import ClosedIfLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    status: int
    body: Any  # parsed JSON, or text where the server sent text

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300


class ApiClient:
    """A client that authenticates with one client certificate."""

    def __init__(self, server: Server, pair: KeyPair, *, user_agent: str) -> None:
        address = urlsplit(server.url)
        assert address.hostname is not None and address.port is not None
        self._host, self._port = address.hostname, address.port
        self._user_agent = user_agent
        self._tls = ssl.create_default_context(cafile=str(server.authority))
        self._tls.sslsocket_class = ClosedIfLost
        self._tls.load_cert_chain(pair.certificate, pair.key)

    def get(self, path: str) -> Response:
        return self.request("GET", path)

    def post(self, path: str, body: Any) -> Response:
        return self.request("POST", path, body)

    def delete(self, path: str) -> Response:
        return self.request("DELETE", path)

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        timeout_seconds: float = 60,
    ) -> Response:
        """Send a request. Every status is a result; a missing answer raises OSError."""
        headers = self._headers | {"Content-Type": content_type}
        connection = self._connection(timeout_seconds)
        try:
            connection.request(method, path, body=None if body is None else json.dumps(body), headers=headers)
            answer = connection.getresponse()
            content = answer.read().decode()
        finally:
            connection.close()
        is_json = answer.headers.get_content_type() == "application/json"
        return Response(status=answer.status, body=json.loads(content) if is_json else content)

    def stream(self, path: str, *, timeout_seconds: float) -> Iterator[Any]:
        """Yield the JSON documents of an endless answer (a watch), one per line. The timeout limits the silence."""
        connection = self._connection(timeout_seconds)
        try:
            connection.request("GET", path, headers=self._headers)
            for line in connection.getresponse():
                yield json.loads(line)
        except http.client.HTTPException as error:
            raise ConnectionError(f"{path}: {error!r}") from error
        finally:
            connection.close()

    @property
    def _headers(self) -> dict[str, str]:
        return {"User-Agent": self._user_agent, "Accept": "application/json"}

    def _connection(self, timeout_seconds: float) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection(self._host, self._port, context=self._tls, timeout=timeout_seconds)
