"""One attempt of a request: send it to one replica and relay the answer, or say why another replica may be tried."""

import asyncio
import logging
from dataclasses import dataclass
from time import monotonic
from types import SimpleNamespace

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from quire_common.contract.engine import ENGINE_STOPPED, KEY_LIMIT, RESUMABLE_HEADER, USAGE_HEADER
from quire_common.contract.gateway import TRACK_HEADER
from quire_common.rate_limits import Allowance
from quire_gateway import event_stream, headers
from quire_gateway.bodies import Body, BodyPayload
from quire_gateway.canary import TrackedAttempt
from quire_gateway.errors import ShuttingDown, UpstreamFailed, error_code
from quire_gateway.event_stream import OpenStream, WaitComments
from quire_gateway.fleet import Backend, Pool
from quire_gateway.hold_queue import HoldQueue, HoldTicket
from quire_gateway.limits import Charge
from quire_gateway.metrics import Metrics
from quire_gateway.scrape import read_capped


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request after its body was read."""

    request: web.Request
    pool: Pool
    ticket: HoldTicket
    """Its right to wait while no replica can serve it."""
    body: Body
    digest: bytes
    """The digest of its path and body, by which the quarantine knows it."""
    allowance: Allowance | None
    charge: Charge | None
    """The limits of its tenant, and what it has used of them; None without limits."""
    prompt_tokens: float
    """The probable number of tokens of its prompt."""
    blocks: tuple[int, ...]
    """The block hashes of its prompt."""
    track: str
    """The track that its first replica should be on."""
    comments: WaitComments | None
    """The comments until a replica answers; None for an answer without them."""
    id: str
    started: float
    stream: OpenStream
    """The stream to the client."""

    @property
    def current_track(self) -> str:
        """The track that its next replica should be on: a stream stays on the track that began it."""
        return self.stream.track or self.track


BUSY, UNAVAILABLE = 429, 503
_ENGINE_ENDS = "shutting_down"
"""The code of the error with which an engine ends the streams that its drain leaves."""
UNSUITED = "unsuited"
"""The reason of the failed attempt of a replica that cannot continue a stream, for example with another tokenizer."""
NO_FAULT = frozenset({"busy", "moved", "stale", UNSUITED})
"""The reasons of failed attempts that are no errors of the replica's track: a full queue, a stream that leaves a
terminating replica, an idle connection that was closed, a stream of another model version.
"""
REFUSALS = frozenset({"busy", "stale", "unavailable", "unreachable", UNSUITED})
"""The reasons of failed attempts in which the replica did not work on the request."""
LOST = frozenset({"disconnected", "engine_stopped"})
"""The reasons of attempts that were under way when the replica, or its engine process, died."""
GONE = frozenset({"stale", "unreachable", "unavailable"})
"""The reasons of the attempts that follow a stale one if the replica, or its engine process, died at that one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedAttempt:
    """An attempt that failed before the first byte."""

    reason: str
    cause: str
    answer: web.Response | None = None
    """The replica's answer, if it gave one."""


class ReplicaDied(Exception):
    """A replica whose connection broke during its answer. Writing to the client raises the same errors in aiohttp."""


def disconnected(backend: Backend, error: Exception) -> FailedAttempt:
    """Return the failed attempt of a replica that closed the connection too early, and record its failure."""
    backend.record_failure(monotonic(), unreachable=True)
    return FailedAttempt(reason="disconnected", cause=f"closed the connection before the end of its answer: {error}")


def refusal(answer: web.Response, code: str | None) -> FailedAttempt:
    """Return the failed attempt of an answer with status 429 or 503 and this code of its error."""
    if answer.status == BUSY:
        reason, cause = "busy", f"answered {answer.status}"
    elif code == ENGINE_STOPPED:
        reason, cause = "engine_stopped", "lost its engine process while it worked on the request"
    else:
        reason, cause = "unavailable", f"answered {answer.status}"
    return FailedAttempt(reason=reason, cause=cause, answer=answer)


def lost_stream(stream: OpenStream, death: ReplicaDied) -> FailedAttempt | None:
    """Return the failed attempt of a stream that another replica can continue; None for a stream that has ended."""
    if stream.is_complete:
        return None
    code = stream.error_code()
    if code == _ENGINE_ENDS:
        return FailedAttempt(reason="moved", cause="is terminating")
    if code == ENGINE_STOPPED:
        return FailedAttempt(reason="engine_stopped", cause="lost its engine process while it worked on the stream")
    return None if code else FailedAttempt(reason="disconnected", cause=f"closed the connection of the stream: {death}")


_MAX_ERROR_BYTES = 64 * 1024
_MAX_WHOLE_BYTES = 2**20
"""Shorter answers of a known length are read whole before the first byte is forwarded."""
_LARGE_BODY_BYTES = 2**16
"""Larger bodies are sent in pieces."""
_SERVER_ERROR, _CLIENT_ERROR = 500, 400
_STALE_SECONDS = 0.05
_MAX_STREAM_BYTES_PER_SECOND = 4 * 2**20
"""The rate at which one stream is relayed: many times that of the fastest answer with logprobs. One that sends as fast
as it can would take the event loop from all others."""
_BURST_SECONDS = 0.1
"""An idle connection that closes this soon after a request was sent was closed before the replica saw the request."""

_log = logging.getLogger(__name__)


class ConnectionUse:
    """A record of whether a request used a connection that had served another request before."""

    __slots__ = ("reused",)

    def __init__(self) -> None:
        self.reused = False


def tracing() -> aiohttp.TraceConfig:
    """Return the tracing of a session, which alone knows which connections are reused."""

    async def reused(session: aiohttp.ClientSession, context: SimpleNamespace, params: object) -> None:
        if isinstance(context.trace_request_ctx, ConnectionUse):
            context.trace_request_ctx.reused = True

    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(reused)
    return trace


class Attempts:
    """The attempts of all requests. ``cancelling`` is set when the drain time is over: then running requests fail."""

    def __init__(
        self, *, session: aiohttp.ClientSession, metrics: Metrics, queue: HoldQueue, hides_names: bool
    ) -> None:
        self._session, self._metrics, self._queue, self._hides_names = session, metrics, queue, hides_names
        self.cancelling = False

    async def send(self, call: Call, backend: Backend) -> web.StreamResponse | FailedAttempt:
        """Send the request to one replica, and count the result for the replica's track and the tenant's limits."""
        tracked = call.pool.tracked(backend)
        if call.charge is not None:
            call.charge.start_attempt()
        try:
            outcome = await self._send(call, backend, tracked)
        finally:
            if tracked is not None:
                tracked.stop_waiting(monotonic())
        if call.charge is not None and _is_refusal(outcome):
            call.charge.record_refusal()
        if tracked is not None and isinstance(outcome, web.StreamResponse):
            tracked.end(is_error=outcome.status >= _SERVER_ERROR)
        elif tracked is not None and isinstance(outcome, FailedAttempt) and outcome.reason not in NO_FAULT:
            # Another replica may answer the client; the failure counts here nevertheless.
            tracked.end(is_error=True)
        return outcome

    async def _send(
        self, call: Call, backend: Backend, tracked: TrackedAttempt | None
    ) -> web.StreamResponse | FailedAttempt:
        with backend.request(call.prompt_tokens):
            sent, connection = monotonic(), ConnectionUse()
            try:
                upstream = await self._session.post(
                    # Built from the path: a client that uses the gateway as its proxy sends a whole URL.
                    URL(f"{backend.endpoint.url}{call.request.path_qs}", encoded=True),
                    data=_payload(call),
                    headers=self._headers_to_replica(call, backend),
                    allow_redirects=False,
                    trace_request_ctx=connection,
                )
            except aiohttp.ClientConnectorError as error:
                backend.record_failure(monotonic(), unreachable=True)
                return FailedAttempt(reason="unreachable", cause=f"could not be reached: {error.strerror}")
            except aiohttp.ConnectionTimeoutError:
                # The replica never got the request: its machine is gone, or the network to it.
                backend.record_failure(monotonic(), unreachable=True)
                return FailedAttempt(reason="unreachable", cause="could not be reached: connecting timed out")
            except (aiohttp.ClientError, TimeoutError) as error:
                if connection.reused and monotonic() - sent < _STALE_SECONDS:
                    return FailedAttempt(reason="stale", cause="closed an idle connection as it was reused")
                return disconnected(backend, error)
            try:
                return await self._answer(call, backend, upstream, tracked)
            finally:
                # A connection that was read to the end goes back to the pool. Any other is closed at once, which tells
                # the engine that the client is gone.
                if upstream.content.at_eof():
                    upstream.release()
                else:
                    upstream.close()

    async def _answer(
        self, call: Call, backend: Backend, upstream: aiohttp.ClientResponse, tracked: TrackedAttempt | None
    ) -> web.StreamResponse | FailedAttempt:
        """Relay the replica's answer, unless its status means that another replica should be tried."""
        if upstream.status in (BUSY, UNAVAILABLE):
            return await self._refused(call, backend, upstream)
        if call.stream.response is not None and upstream.content_type != event_stream.CONTENT_TYPE:
            if _CLIENT_ERROR <= upstream.status < _SERVER_ERROR:
                # Other replicas may run the version of the model that began the stream.
                call.stream.unsuited.add(backend.endpoint.id)
                return FailedAttempt(reason=UNSUITED, cause=f"answered {upstream.status} to continue the stream")
            raise UpstreamFailed(
                f"a replica died, and another one answered {upstream.status} to the request to continue the stream"
            )
        length = upstream.content_length
        if length is None or length > _MAX_WHOLE_BYTES:
            # Only an engine that sends the tokens of the stream announces it.
            is_resumable = upstream.headers.get(RESUMABLE_HEADER) == "yes"
            self._accepted(call, backend, upstream.status, keeps_body=is_resumable)
            return await self._stream(call, backend, upstream, tracked)
        try:
            whole = await upstream.read()
        except aiohttp.ClientError as error:
            return disconnected(backend, error)
        self._accepted(call, backend, upstream.status)
        self._first_byte(call)
        _note_bytes(tracked, upstream.status)
        _read_usage(call, whole, is_last=True)
        return web.Response(
            status=upstream.status,
            reason=upstream.reason,
            headers=self._headers_to_client(call, backend, upstream),
            body=whole,
        )

    def _accepted(self, call: Call, backend: Backend, status: int, *, keeps_body: bool = False) -> None:
        """Record that the replica accepted the request: only a resumable stream may go to another one after this."""
        call.ticket.close()
        if not keeps_body:
            call.body.release()
        self._queue.release(call.pool)
        backend.record_answer()
        self._metrics.requests.labels(call.pool.model, backend.endpoint.id, str(status)).inc()
        if call.stream.response is not None:
            self._metrics.resumed_streams.labels(call.pool.model).inc()

    def _headers_to_replica(self, call: Call, backend: Backend) -> CIMultiDict[str]:
        passed = headers.to_replica(call.request, audience=call.pool.audience, request_id=call.id)
        if call.charge is not None:
            passed[USAGE_HEADER] = "1"
        passed[RESUMABLE_HEADER] = "1"
        return passed

    def _headers_to_client(self, call: Call, backend: Backend, upstream: aiohttp.ClientResponse) -> CIMultiDict[str]:
        replica = None if self._hides_names else backend.endpoint.id
        passed = headers.to_client(upstream.headers, request_id=call.id, replica=replica)
        if call.allowance is not None:
            passed.update(call.allowance.headers())
        passed.pop(TRACK_HEADER, None)
        if call.pool.tracks is not None:
            passed[TRACK_HEADER] = backend.endpoint.track
        return passed

    async def _refused(
        self, call: Call, backend: Backend, upstream: aiohttp.ClientResponse
    ) -> web.StreamResponse | FailedAttempt:
        """Return the failed attempt; a refusal for the limits of the client's key is the answer."""
        if upstream.status == UNAVAILABLE:
            backend.record_failure(monotonic(), unreachable=False)
        try:
            body = await read_capped(upstream.content, _MAX_ERROR_BYTES)
        except (aiohttp.ClientError, ValueError):
            body = b""
        answer = web.Response(
            status=upstream.status, headers=self._headers_to_client(call, backend, upstream), body=body
        )
        code = error_code(body)
        if upstream.status == BUSY and code == KEY_LIMIT and call.stream.response is None:
            # Each further replica would charge the key once more.
            self._accepted(call, backend, upstream.status)
            return answer
        return refusal(answer, code)

    async def _stream(
        self, call: Call, backend: Backend, upstream: aiohttp.ClientResponse, tracked: TrackedAttempt | None
    ) -> web.StreamResponse | FailedAttempt:
        """Relay every chunk as it comes. Return the failed attempt if another replica can continue the stream."""
        stream, is_first = call.stream, call.stream.response is None
        events = event_stream.EventSplitter() if upstream.content_type == event_stream.CONTENT_TYPE else None
        response = stream.response = await self._begin(call, backend, upstream)
        stream.start(is_announced=upstream.headers.get(RESUMABLE_HEADER) == "yes", track=backend.endpoint.track)
        pace = _Pace()
        try:
            while chunk := await _next(upstream):
                if is_first:
                    self._first_byte(call)
                    is_first = False
                _note_bytes(tracked, upstream.status, chunk)
                whole = stream.feed(events.feed(chunk)) if events else chunk
                if out := _read_usage(call, whole):
                    await response.write(out)
                    await pace.wait(len(out))
                if stream.may_move and call.pool.is_leaving(backend, monotonic()):
                    return FailedAttempt(reason="moved", cause="is terminating")
            rest = stream.flush() + events.flush() if events else b""
            if rest := _read_usage(call, rest, is_last=True):
                await response.write(rest)
            if events and events.error is not None:
                stream.has_died = error_code(events.error) == ENGINE_STOPPED
                _note_broken(tracked)
        except ReplicaDied as death:
            lost = lost_stream(stream, death) if stream.is_resumable else None
            if lost is None or lost.reason not in NO_FAULT:
                _note_broken(tracked)
            if lost is not None:
                backend.record_failure(monotonic(), unreachable=lost.reason == "disconnected")
                return lost
            error = None if events is None else events.error
            has_ended = error is not None or stream.is_complete
            stream.has_died = not has_ended or (error is not None and error_code(error) == ENGINE_STOPPED)
            await self._break(call, backend, response, death, has_ended=has_ended)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self.cancelling or task is None:
                raise
            task.uncancel()
            shutdown = ShuttingDown("this gateway is shutting down")
            await end_with_error(call.request, response, shutdown.body(call.request.path))
        return response

    async def _break(
        self, call: Call, backend: Backend, response: web.StreamResponse, death: Exception, *, has_ended: bool
    ) -> None:
        """End a stream whose replica died; one that ``has_ended`` has its last event already."""
        self._metrics.broken_streams.labels(call.pool.model, backend.endpoint.id).inc()
        _log.warning("stream broken: request %s: replica %s: %s", call.id, backend.endpoint.id, death)
        if rest := call.stream.flush():
            await response.write(rest)
        if has_ended:
            # The replica sent an error event itself: no second one follows.
            response.force_close()
            await response.write_eof()
        else:
            error = UpstreamFailed("the replica died before the end of this answer")
            await end_with_error(call.request, response, error.body(call.request.path))

    async def _begin(self, call: Call, backend: Backend, upstream: aiohttp.ClientResponse) -> web.StreamResponse:
        """Return the response to the client, which begins now unless an earlier replica or a comment began it."""
        if call.stream.response is not None:
            return call.stream.response
        response = None if call.comments is None else await call.comments.stop()
        if response is None:
            response = web.StreamResponse(
                status=upstream.status,
                reason=upstream.reason,
                headers=self._headers_to_client(call, backend, upstream),
            )
            response.content_length = upstream.content_length
            await response.prepare(call.request)
        elif upstream.content_type != event_stream.CONTENT_TYPE:
            raise UpstreamFailed("the replica's answer is not a stream")
        return response

    def _first_byte(self, call: Call) -> None:
        self._metrics.first_byte.labels(call.pool.model).observe(monotonic() - call.started)


async def _next(upstream: aiohttp.ClientResponse) -> bytes:
    """Return what has arrived; empty at the end."""
    try:
        return await upstream.content.readany()
    except aiohttp.ClientError as error:
        raise ReplicaDied(str(error)) from error


async def end_with_error(request: web.Request, response: web.StreamResponse, error: bytes) -> None:
    """End an answer that has started so that it cannot be mistaken for a complete one."""
    response.force_close()
    if response.content_type == event_stream.CONTENT_TYPE:
        await response.write(event_stream.error_event(error))
        await response.write_eof()
    elif request.transport is not None:
        # There is no place for a message: the missing end of the chunked body is the error.
        request.transport.abort()


class _Pace:
    """The rate of one stream."""

    def __init__(self) -> None:
        self._due = 0.0

    async def wait(self, size_bytes: int) -> None:
        """Count relayed bytes, and wait where they exceed the rate."""
        now = monotonic()
        self._due = max(self._due, now) + size_bytes / _MAX_STREAM_BYTES_PER_SECOND
        if self._due - now > _BURST_SECONDS:
            await asyncio.sleep(self._due - now)


def _note_bytes(tracked: TrackedAttempt | None, status: int, chunk: bytes = b"") -> None:
    """Record the arrival of a part of an answer; the time to an error says nothing."""
    if tracked is not None and status < _CLIENT_ERROR:
        tracked.note_bytes(monotonic(), events=chunk.count(event_stream.EVENT_END))


def _is_refusal(outcome: web.StreamResponse | FailedAttempt) -> bool:
    """Return whether the replica did not work on the request."""
    if isinstance(outcome, FailedAttempt):
        return outcome.reason in REFUSALS
    return _CLIENT_ERROR <= outcome.status < _SERVER_ERROR


def _note_broken(tracked: TrackedAttempt | None) -> None:
    if tracked is not None:
        tracked.end(is_error=True)


def _read_usage(call: Call, data: bytes, *, is_last: bool = False) -> bytes:
    """Return a part of an answer without what is meant for the gateway, whose usage is charged."""
    if call.charge is None:
        return data
    passed = call.charge.read(data)
    if is_last:
        call.charge.end()
    return passed


def _payload(call: Call) -> BodyPayload | bytes:
    body = call.body
    if call.stream.response is not None:
        return call.stream.body(bytes(body.data))
    return BodyPayload(body) if len(body.data) > _LARGE_BODY_BYTES else bytes(body.data)
