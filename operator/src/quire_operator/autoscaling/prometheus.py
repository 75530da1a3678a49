"""Metrics from a Prometheus server, or another server with its HTTP API: ``metricsSource: Prometheus``.

A tick sends two queries, whatever the number of LLMDeployments. After any failure there are no samples, and ``problem``
says why.
"""

import asyncio
import gc
import logging
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import httpx
import msgspec

from quire_operator.autoscaling.engine_metrics import (
    PrometheusOptions,
    Series,
    Told,
    by_replica,
    figures_query,
    samples,
    times_query,
)
from quire_operator.autoscaling.observation import Clock, ReplicaAddress, ReplicaSample

T = TypeVar("T")

_TIMEOUT_SECONDS = 10.0
_MAX_BYTES = 256 * 2**20
_SHOWN_CHARACTERS = 300

_log = logging.getLogger(__name__)


class _Element(msgspec.Struct):
    metric: dict[str, str]
    value: tuple[float, str]


class _Vector(msgspec.Struct):
    result: list[_Element]
    resultType: str = "vector"


class _Answer(msgspec.Struct):
    status: str
    data: _Vector | None = None
    error: str = ""
    warnings: list[str] = []


class _Reply(NamedTuple):
    status: int
    body: bytes


class _NoAnswer(Exception):
    """Prometheus gave no usable answer: a message, and a reason for the metric."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Prometheus:
    def __init__(
        self,
        options: PrometheusOptions,
        *,
        clock: Clock,
        client: httpx.AsyncClient | None = None,
        failed: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """``failed`` is called with the reason when a tick had no answer."""
        self._options, self._clock, self._failed = options, clock, failed
        self._client = client or httpx.AsyncClient(
            timeout=_TIMEOUT_SECONDS, verify=_trusted(options.ca_file), trust_env=False
        )
        self._queries = figures_query(options.labels), times_query(options.labels)
        self.problem: str | None = None
        """The reason why the last tick had no answer; None if it had one."""
        self.last_answer = 0.0
        """The Unix time of the last answer; 0 before the first."""

    async def aclose(self) -> None:
        await self._client.aclose()

    async def samples(self, replicas: Sequence[ReplicaAddress]) -> Mapping[str, ReplicaSample]:
        """Return the newest sample of each replica by name. Series of replicas that no longer exist are ignored."""
        found = await self._answer(self._queries, self._understand) if replicas else None
        if found is None:
            return {}
        named = {replica.name: found.get(replica.name) or found.get(_instance(replica)) for replica in replicas}
        return {name: sample for name, sample in named.items() if sample is not None}

    async def told(self, names: Collection[str], *, offset: str = "") -> Mapping[str, Told] | None:
        """Return the metrics with these names by ``namespace/pod`` or ``host:port``, or None without an answer."""
        labels = self._options.labels
        queries = figures_query(labels, names, offset=offset), times_query(labels, offset=offset)
        return await self._answer(
            queries, lambda figures, times: by_replica(_read(figures), _read(times), labels=labels)
        )

    async def _answer(self, queries: tuple[str, str], understand: Callable[[_Reply, _Reply], T]) -> T | None:
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                answers = await asyncio.gather(*map(self._query, queries))
                # A thousand LLMDeployments have 20 MB of series, and the event loop must stay responsive.
                found = await asyncio.to_thread(understand, *answers)
        except (_NoAnswer, httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError) as error:
            self._failed(_reason(error))
            self._note(str(error) or type(error).__name__)
            return None
        self._note(None)
        self.last_answer = self._clock()
        return found

    def _understand(self, figures: _Reply, times: _Reply) -> dict[str, ReplicaSample]:
        # A hundred thousand objects are created and none of them is garbage; a collection would take as long as the
        # parsing.
        collecting = gc.isenabled()
        gc.disable()
        try:
            return samples(_read(figures), _read(times), labels=self._options.labels, now=self._clock())
        finally:
            if collecting:
                gc.enable()

    async def _query(self, query: str) -> _Reply:
        headers = {}
        if self._options.token_file is not None:
            headers["Authorization"] = f"Bearer {_token(self._options.token_file)}"
        url = f"{self._options.url.rstrip('/')}/api/v1/query"
        async with self._client.stream("POST", url, data={"query": query}, headers=headers) as response:
            body = bytearray()
            async for chunk in response.aiter_bytes():
                body += chunk
                if len(body) > _MAX_BYTES:
                    raise _NoAnswer(f"it answers with more than {_MAX_BYTES >> 20} MiB", reason="bad_answer")
        return _Reply(response.status_code, bytes(body))

    def _note(self, problem: str | None) -> None:
        """Store the problem, and log it if it has changed."""
        if problem != self.problem:
            if problem is None:
                _log.info("Prometheus answers again: %s", self._options.url)
            else:
                _log.warning("Prometheus query failed: %s: %s", self._options.url, problem)
        self.problem = problem


def _trusted(ca_file: Path | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=None if ca_file is None else str(ca_file))


def _token(file: Path) -> str:
    """Return the token. Raises ``_NoAnswer`` or ``OSError``."""
    token = file.read_bytes().strip()
    if not all(0x20 < byte < 0x7F for byte in token):
        raise _NoAnswer(f"the token in {file} has characters that an HTTP header cannot carry", reason="token")
    return token.decode("ascii")


def _reason(error: Exception) -> str:
    """Return the reason for the metric."""
    match error:
        case _NoAnswer(reason=reason):
            return reason
        case TimeoutError() | httpx.TimeoutException():
            return "timeout"
        case httpx.HTTPError() | httpx.InvalidURL():
            return "unreachable"
        case _:
            return "token"  # the token file cannot be read


def _status_reason(status: int) -> str | None:
    if status in (401, 403):
        return "unauthorized"
    return None if status == 200 else "http"


def _instance(replica: ReplicaAddress) -> str:
    """Return host and port, as Prometheus names a target."""
    if replica.metrics_url is None:
        return ""
    url = httpx.URL(replica.metrics_url)
    return url.netloc.decode()


def _read(reply: _Reply) -> list[Series]:
    """Return the series of an answer. Raises ``_NoAnswer``."""
    status, body = reply
    try:
        answer = msgspec.json.decode(body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        shown = body[:_SHOWN_CHARACTERS].decode(errors="replace").strip()
        reason = _status_reason(status) or "bad_answer"
        raise _NoAnswer(f"HTTP {status}, not an answer of its API ({error}): {shown}", reason=reason) from error
    if answer.status != "success" or answer.data is None:
        refused = "unauthorized" if status in (401, 403) else "query"
        raise _NoAnswer(f"HTTP {status}: {answer.error[:_SHOWN_CHARACTERS]}", reason=refused)
    if answer.warnings:
        _log.warning("Prometheus warning: %s", "; ".join(answer.warnings)[:_SHOWN_CHARACTERS])
    return [Series(element.metric, element.value[0], _value(element.value[1])) for element in answer.data.result]


def _value(text: str) -> float:
    """Return the number. Prometheus writes NaN, +Inf and -Inf as Python reads them."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
