"""The connection to the API server: its address, the credentials, single requests, and the leader write fence.

A fenced connection checks the fence for every mutating request at the last moment before its first byte is sent, after
any wait for a socket. So a process that was paused starts no late write.

The number of concurrent writes is as many as the API server answers quickly, found by trying. A server that executes
some writes one by one (such as the allocation of Service addresses) answers the last of thirty only after all others.
The work for calls that time out is wasted, and their retries add to it. So the limit rises by one with every round of
fast answers and falls by a third after a slow one.
"""

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config.config_exception import ConfigException

from quire_operator import __version__
from quire_operator.errors import ClusterProblem
from quire_operator.kube.errors import NotLeading, Unavailable, error_of

QUICK_SECONDS, SLOW_SECONDS = 1.5, 3.0
"""A call times out after ``connection.CALL_SECONDS``."""
FEWEST, FIRST, MOST = 4.0, 16.0, 32.0
_KEPT = 2.0 / 3.0


class Pace:
    """The current limit, adjusted with each answer."""

    def __init__(self) -> None:
        self.limit = FIRST
        self._lowered = float("-inf")

    def answered(self, seconds: float, now: float) -> None:
        """Adjust the limit to the duration of a write, whatever its result."""
        if seconds <= QUICK_SECONDS:
            self.limit = min(MOST, self.limit + 1.0 / self.limit)
        elif seconds >= SLOW_SECONDS and now - self._lowered >= seconds:
            # Writes that ran together with a slow one have the same cause, so they lower the limit only once.
            self.limit, self._lowered = max(FEWEST, self.limit * _KEPT), now


class ConcurrencyLimiter:
    """A semaphore with an adaptive limit. It admits writes in the order of their arrival."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = Pace()
        self._now = now
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for admission, run one write and measure its duration."""
        await self._enter()
        started = self._now()
        try:
            yield
        finally:
            now = self._now()
            self.limit.answered(now - started, now)
            self._inside -= 1
            self._let_in()

    async def _enter(self) -> None:
        if not self._waiting and self._inside < int(self.limit.limit):
            self._inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at once: pass the place on
                self._inside -= 1
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self._inside < int(self.limit.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)


CALL_SECONDS = 5.0
"""The time limit of one call. With the fence's 10 s, a call ends before a lease of 15 s does."""
_IN_CLUSTER = "KUBERNETES_SERVICE_HOST"
_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

JSON = Mapping[str, Any]
Query = Sequence[tuple[str, str]]
WriteFence = Callable[[], bool]
Checkpoint = Callable[[str, str], None]
"""A function that gets the verb and the kind of a write."""


class Read(Protocol):
    """A function that reads a list: the objects, or only their metadata."""

    async def __call__(self, path: str, *, query: Query) -> JSON: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The credentials and address with which another client reaches the same server as the same user."""

    server: str
    ca_path: str | None
    certificate_path: str | None
    private_key_path: str | None
    token: str | None
    verify: bool


def own_namespace() -> str:
    """Return the namespace of the pod that this process runs in, or that of kubectl's default outside pods."""
    file = _ACCOUNT_FOLDER / "namespace"
    return file.read_text().strip() if file.exists() else "default"


def in_cluster() -> bool:
    """Return True if this process runs in a pod."""
    return _IN_CLUSTER in os.environ


async def load_configuration(kubeconfig: str | None) -> Configuration:
    """Load the given kubeconfig, else the pod's service account, else the files that kubectl reads.

    Raises ``ClusterProblem`` if none of these is usable.
    """
    configuration: Configuration = type.__call__(Configuration)
    kubeconfig = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if kubeconfig is None and in_cluster():
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
            token = _TokenFile(_ACCOUNT_FOLDER / "token")
            configuration.refresh_api_key_hook = token.refresh  # type: ignore[assignment]
        else:
            load = config.load_kube_config
            await load(config_file=kubeconfig, client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (ConfigException, OSError, ValueError) as error:
        raise ClusterProblem(
            f"no Kubernetes cluster found: {error}",
            hint="run inside a cluster, or set --kubeconfig or KUBECONFIG to a kubeconfig file",
        ) from error
    configuration.client_session_kwargs = {"trust_env": False}
    return configuration


class _TokenFile:
    """The pod's token, which the kubelet renews: it is read again as soon as the file changes.

    The client library reads it once a minute, so after a token was revoked all calls would fail for that long.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, (0, 0)

    def refresh(self, configuration: Configuration) -> None:
        """Reload the token if its file has changed. The client calls this before each request."""
        try:
            stat = self._path.stat()
            if (stat.st_mtime_ns, stat.st_ino) != self._read and (token := self._path.read_text().strip()):
                configuration.api_key["BearerToken"] = f"bearer {token}"
                self._read = (stat.st_mtime_ns, stat.st_ino)
        except OSError:
            return  # the previous token may still be valid


async def credentials(configuration: Configuration) -> Credentials:
    """Return the current credentials. Tokens expire, so callers request them again every few minutes."""
    token = await configuration.get_api_key_with_prefix("BearerToken")
    return Credentials(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        token=None if token is None else token.split()[-1],
        verify=configuration.verify_ssl,
    )


class Connection:
    """A client with its own connection pool; the owner closes it."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        user: str,
        fence: WriteFence | None = None,
        before_write: Checkpoint | None = None,
        written: Checkpoint | None = None,
    ) -> None:
        """``before_write`` and ``written`` are called for every mutating request, for fail points and for metrics."""
        if fence is not None:
            configuration = _fenced(configuration, fence)
        self._before_write, self._written = before_write, written
        self._limiter = ConcurrencyLimiter()
        self.client = ApiClient(configuration)
        self.client.user_agent = f"quire-operator/{__version__} ({user})"

    async def close(self) -> None:
        await self.client.close()  # type: ignore[no-untyped-call]

    async def read(self, path: str, *, query: Query = ()) -> JSON:
        return await self._request("GET", path, query=query, body=None, content_type=None)

    async def read_metadata(self, path: str, *, query: Query = ()) -> JSON:
        """Return a list with only the metadata of its objects."""
        return _parsed(await self._send("GET", path, query=query, body=None, content_type=None, accept=_METADATA))

    async def read_bytes(self, path: str) -> bytes:
        """Return the body at a path that is not an API object."""
        return await self._send("GET", path, query=(), body=None, content_type=None, accept="*/*")

    async def write(
        self,
        verb: str,
        kind: str,
        method: str,
        path: str,
        *,
        body: JSON,
        query: Query = (),
        content_type: str = "application/json",
    ) -> JSON:
        """Send a mutating request. ``verb`` and ``kind`` name it for fail points and metrics."""
        async with self._limiter.turn():
            if self._before_write is not None:
                self._before_write(verb, kind)
            answer = await self._request(method, path, query=query, body=body, content_type=content_type)
        if self._written is not None:
            self._written(verb, kind)
        return answer

    async def _request(
        self, method: str, path: str, *, query: Query, body: JSON | None, content_type: str | None
    ) -> JSON:
        accept = "application/json"
        return _parsed(await self._send(method, path, query=query, body=body, content_type=content_type, accept=accept))

    async def _send(
        self, method: str, path: str, *, query: Query, body: JSON | None, content_type: str | None, accept: str
    ) -> bytes:
        headers = {"Accept": accept}
        if content_type is not None:
            headers["Content-Type"] = content_type
        try:
            # These two calls are what the client's generated methods and its dynamic client consist of. Importing the
            # generated methods costs 115 MB of memory.
            request = await self.client.param_serialize(
                method, path, query_params=list(query), header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            response = await self.client.call_api(*request, _request_timeout=CALL_SECONDS)
            content: bytes = await response.read()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            raise Unavailable(f"the API server did not answer within {CALL_SECONDS:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the API server cannot be reached: {error or type(error).__name__}") from error
        if response.status >= 400:
            raise error_of(response.status, content, response.headers)
        return content


async def listed(read: Read, path: str, *, query: Query = (), page: int = 200) -> AsyncIterator[JSON]:
    """Yield all items of a list, fetched in pages."""
    token = ""
    while True:
        answer = await read(path, query=(*query, ("limit", str(page)), ("continue", token)))
        for item in answer.get("items") or []:
            yield item
        token = answer.get("metadata", {}).get("continue") or ""
        if not token:
            return


def _parsed(content: bytes) -> JSON:
    try:
        parsed = json.loads(content)
    except ValueError as error:
        raise Unavailable("the API server's answer is incomplete") from error
    except RecursionError as error:
        raise Unavailable("the API server's answer is nested too deeply to be read") from error
    if not isinstance(parsed, Mapping):
        raise Unavailable("the API server's answer is not a JSON object")
    return parsed


def _fenced(configuration: Configuration, fence: WriteFence) -> Configuration:
    async def ask(session: object, context: SimpleNamespace, sent: aiohttp.TraceRequestHeadersSentParams) -> None:
        if sent.method not in ("GET", "HEAD") and not fence():
            raise NotLeading("the lease was not renewed in time; nothing is written")

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(ask)
    gated: Configuration = type.__call__(Configuration)
    gated.__dict__.update(configuration.__dict__)
    gated.trace_configs = [trace]
    return gated
