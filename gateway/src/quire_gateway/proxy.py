"""One request's way: read → model → pick → ask → relay; again on another replica only before the first byte.

Under ``app``, which routes to ``Proxy.handle``. Holds when no replica can take it, cuts nothing while it streams, ends
a broken stream with an error event and no ``[DONE]``, and drops the replica's connection as soon as the client is gone.
"""

import asyncio
import io
import logging
from dataclasses import dataclass
from time import monotonic
from types import SimpleNamespace

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from quire_gateway import headers, sse
from quire_gateway.balance import Hold
from quire_gateway.config import ProxyOptions
from quire_gateway.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    RequestTimeout,
    ShuttingDown,
    UnknownModel,
    UpstreamFailed,
)
from quire_gateway.fleet import Backend, Fleet, Pool
from quire_gateway.holding import Holding, Place
from quire_gateway.metrics import Metrics
from quire_gateway.prefixes import Prompt, prompt_blocks, prompt_bytes
from quire_gateway.scrape import read_capped

MODEL = web.RequestKey("model", str)
"""Under this a request remembers the model it was found to ask for."""
_GENERATING = "/v1/"
_BUSY = 429
_UNAVAILABLE = 503
_MAX_REFUSAL_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 2**20
"""Answers of a known length up to this are read whole before the first byte goes out."""
_LARGE_BODY_BYTES = 2**20
_READ_SECONDS = 60.0
_STALE_SECONDS = 0.05
"""An idle connection that ends this soon after a request was sent had ended before the replica could see it."""

_log = logging.getLogger(__name__)


class Connection:
    """Whether a request went over a connection that had served another before."""

    __slots__ = ("reused",)

    def __init__(self) -> None:
        self.reused = False


def tracing() -> aiohttp.TraceConfig:
    """For the session: it alone knows which connections are used again."""

    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if isinstance(context.trace_request_ctx, Connection):
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


class _Peek(Prompt):
    """All the gateway wants to know of a body."""

    model: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """One request, read."""

    request: web.Request
    pool: Pool
    place: Place
    """Where it waits while no replica can take it."""
    body: bytes
    prompt_tokens: float
    """As many as such a prompt probably has."""
    blocks: tuple[int, ...]
    """Of its prompt."""
    id: str
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refusal:
    """An attempt that came to nothing before the first byte."""

    reason: str
    cause: str
    answer: web.Response | None = None
    """What the replica said, where it said something."""


class Proxy:
    """Forwards requests. ``cutting`` is set when the drain time is over: what still runs then ends in an error."""

    def __init__(
        self, *, fleet: Fleet, session: aiohttp.ClientSession, options: ProxyOptions, metrics: Metrics, holding: Holding
    ) -> None:
        self._fleet, self._session, self._options = fleet, session, options
        self._metrics, self._holding = metrics, holding
        self.cutting = False
        self.running: set[asyncio.Task[object]] = set()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request by a replica of the model it names. Raises ``GatewayError``."""
        task = asyncio.current_task()
        assert task is not None
        # From here on, though its body may still be on the way: what was begun is finished before the gateway ends.
        self.running.add(task)
        try:
            return await self._answered(request)
        except asyncio.CancelledError:
            if not self.cutting:
                raise
            task.uncancel()
            raise ShuttingDown("this gateway is shutting down", retry_after_seconds=1) from None
        finally:
            self.running.discard(task)

    async def _answered(self, request: web.Request) -> web.StreamResponse:
        started = monotonic()
        body = await self._read(request)
        peek, model = _peek(body)
        pool = self._pool(model)
        request[MODEL] = pool.model
        if not request.path.startswith(_GENERATING):
            # Tokenizing computes nothing of a prompt and leaves nothing of it in a cache.
            peek = Prompt()
        try:
            with self._holding.place(pool, size_bytes=len(body)) as place:
                call = _Call(
                    request=request,
                    pool=pool,
                    place=place,
                    body=body,
                    prompt_tokens=pool.prompt_tokens(prompt_bytes(peek)),
                    blocks=prompt_blocks(peek),
                    id=headers.request_id(request.headers),
                    started=started,
                )
                return await self._serve(call)
        except asyncio.CancelledError:
            if not self.cutting:
                self._metrics.disconnects.labels(pool.model).inc()
            raise
        finally:
            self._metrics.duration.labels(pool.model).observe(monotonic() - started)

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                return await request.read()
        except TimeoutError:
            raise RequestTimeout(f"the request body did not come within {_READ_SECONDS:.0f} s") from None
        except web.HTTPRequestEntityTooLarge:
            limit = self._options.max_body_bytes
            raise BodyTooLarge(f"the request body is larger than {limit} bytes, the most this gateway takes") from None
        except web.RequestPayloadError as error:
            raise BadRequest(
                f"the request body can't be unpacked or broke off: {' '.join(str(error).split())}"
            ) from None

    def _pool(self, model: str) -> Pool:
        pool = self._fleet.pools.get(model)
        if pool is None:
            served = ", ".join(sorted(self._fleet.pools)) or "none"
            raise UnknownModel(f"the model {model[:200]!r} does not exist; served here: {served[:2000]}")
        return pool

    async def _serve(self, call: _Call) -> web.StreamResponse:
        """Attempts, one replica after the other, until one answers; holds while none can."""
        tried: set[str] = set()
        refusal: _Refusal | None = None
        disconnected = stale = False
        while True:
            choice = self._pick(call, tried)
            if isinstance(choice, Hold):
                if refusal is not None and refusal.reason == "busy" and refusal.answer is not None:
                    self._metrics.errors.labels(call.pool.model, str(_BUSY), refusal.reason).inc()
                    return refusal.answer
                await call.place.wait(cause=None if refusal is None else refusal.cause)
                tried.clear()
                continue
            outcome = await self._attempt(call, choice)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            if outcome.reason == "stale" and not stale:
                stale = True
                continue
            if outcome.reason == "disconnected" and disconnected:
                raise UpstreamFailed(f"two replicas of {call.pool.model} died while they worked on this request")
            disconnected |= outcome.reason == "disconnected"
            refusal = outcome
            tried.add(choice.endpoint.id)
            self._metrics.retries.labels(call.pool.model, outcome.reason).inc()
            _log.info("request %s: %s %s", call.id, choice.endpoint.id, outcome.cause)

    def _pick(self, call: _Call, tried: set[str]) -> Backend | Hold:
        if len(tried) >= self._options.max_attempts:
            return Hold()
        return call.pool.pick(prompt_tokens=call.prompt_tokens, blocks=call.blocks, exclude=tried)

    async def _attempt(self, call: _Call, backend: Backend) -> web.StreamResponse | _Refusal:
        """Ask one replica."""
        with backend.request(call.prompt_tokens):
            sent, connection = monotonic(), Connection()
            try:
                upstream = await self._session.post(
                    # Not as it came: a client that takes us for its proxy sends a whole URL.
                    URL(f"{backend.endpoint.url}{call.request.path_qs}", encoded=True),
                    data=io.BytesIO(call.body) if len(call.body) > _LARGE_BODY_BYTES else call.body,
                    headers=headers.to_replica(call.request.headers, request_id=call.id),
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except aiohttp.ClientConnectorError as error:
                backend.failed(monotonic(), unreachable=True)
                return _Refusal(reason="unreachable", cause=f"can't be reached: {error.strerror}")
            except aiohttp.ConnectionTimeoutError:
                # It never had the request: its machine is gone, or the network to it.
                backend.failed(monotonic(), unreachable=True)
                return _Refusal(reason="unreachable", cause="can't be reached: no answer to the attempt to connect")
            except (aiohttp.ClientError, TimeoutError) as error:
                if connection.reused and monotonic() - sent < _STALE_SECONDS:
                    return _Refusal(reason="stale", cause="closed an idle connection just as it was used again")
                return _disconnected(backend, error)
            try:
                return await self._answer(call, backend, upstream)
            finally:
                # Read to its end it goes back to the pool; broken off, its connection is closed at once, which is how
                # the engine learns that nobody waits any more.
                if upstream.content.at_eof():
                    upstream.release()
                else:
                    upstream.close()

    async def _answer(
        self, call: _Call, backend: Backend, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse | _Refusal:
        """Relay what the replica says, unless it says that another one should be asked."""
        if upstream.status in (_BUSY, _UNAVAILABLE):
            return await self._refusal(call, backend, upstream)
        length = upstream.content_length
        if length is None or length > _MAX_WHOLE_BYTES:
            self._taken(call, backend, upstream.status)
            return await self._stream(call, backend, upstream)
        try:
            whole = await upstream.read()
        except aiohttp.ClientError as error:
            return _disconnected(backend, error)
        self._taken(call, backend, upstream.status)
        self._first_byte(call)
        return web.Response(
            status=upstream.status,
            reason=upstream.reason,
            headers=headers.to_client(upstream.headers, request_id=call.id, replica=backend.endpoint.id),
            body=whole,
        )

    def _taken(self, call: _Call, backend: Backend, status: int) -> None:
        """From here on no other replica is asked."""
        call.place.leave()
        backend.answered()
        self._metrics.requests.labels(call.pool.model, backend.endpoint.id, str(status)).inc()

    async def _refusal(self, call: _Call, backend: Backend, upstream: aiohttp.ClientResponse) -> _Refusal:
        if upstream.status == _UNAVAILABLE:
            backend.failed(monotonic(), unreachable=False)
        try:
            body = await read_capped(upstream.content, _MAX_REFUSAL_BYTES)
        except (aiohttp.ClientError, ValueError):
            body = b""
        return _Refusal(
            reason="busy" if upstream.status == _BUSY else "unavailable",
            cause=f"answered {upstream.status}",
            answer=web.Response(
                status=upstream.status,
                headers=headers.to_client(upstream.headers, request_id=call.id, replica=backend.endpoint.id),
                body=body,
            ),
        )

    async def _stream(self, call: _Call, backend: Backend, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Every chunk as it comes."""
        response = web.StreamResponse(
            status=upstream.status,
            reason=upstream.reason,
            headers=headers.to_client(upstream.headers, request_id=call.id, replica=backend.endpoint.id),
        )
        response.content_length = upstream.content_length
        events = sse.EventSplitter() if upstream.content_type == sse.CONTENT_TYPE else None
        await response.prepare(call.request)
        is_first = True
        try:
            while chunk := await _next(upstream):
                if is_first:
                    self._first_byte(call)
                    is_first = False
                if out := events.feed(chunk) if events else chunk:
                    await response.write(out)
            if events and (rest := events.flush()):
                await response.write(rest)
        except _Died as error:
            self._metrics.broken_streams.labels(call.pool.model, backend.endpoint.id).inc()
            _log.warning("request %s: %s died in the midst of its answer: %s", call.id, backend.endpoint.id, error)
            if events and events.told_error:
                # The replica said itself why: one error event, and the end.
                response.force_close()
                await response.write_eof()
            else:
                await _break_off(call.request, response, UpstreamFailed("the replica died in the midst of this answer"))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.cutting or task is None:
                raise
            task.uncancel()
            await _break_off(call.request, response, ShuttingDown("this gateway is shutting down"))
        return response

    def _first_byte(self, call: _Call) -> None:
        self._metrics.first_byte.labels(call.pool.model).observe(monotonic() - call.started)


class _Died(Exception):
    """The replica's connection broke while it answered. Writing to our client raises other errors of the same kind."""


async def _next(upstream: aiohttp.ClientResponse) -> bytes:
    """What has come since; empty at the end."""
    try:
        return await upstream.content.readany()
    except aiohttp.ClientError as error:
        raise _Died(str(error)) from error


def _disconnected(backend: Backend, error: Exception) -> _Refusal:
    backend.failed(monotonic(), unreachable=True)
    return _Refusal(reason="disconnected", cause=f"closed the connection before the end of its answer: {error}")


async def _break_off(request: web.Request, response: web.StreamResponse, error: GatewayError) -> None:
    """End an answer that has begun so that nobody takes it for a whole one."""
    response.force_close()
    if response.content_type == sse.CONTENT_TYPE:
        await response.write(sse.error_event(error.body()))
        await response.write_eof()
    elif request.transport is not None:
        # No room for words: the missing end of the chunked body is the error.
        request.transport.abort()


def _peek(body: bytes) -> tuple[Prompt, str]:
    """A body's prompt, and the model it names. Everything else in it is the replica's to judge."""
    try:
        peek = msgspec.json.decode(body, type=_Peek)
    except msgspec.ValidationError as error:
        raise BadRequest(f'the body must be a JSON object with a string "model": {error}', param="model") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise BadRequest("the body is not valid JSON: it is nested too deeply") from None
    if not peek.model:
        raise BadRequest('the body names no "model"', param="model", code="missing_required_parameter")
    return peek, peek.model
