"""The way of one request: read → model → pick → attempt; another replica is tried only before the first byte.

Under ``app``, which routes to ``Proxy.handle``. A request is held while no replica can serve it.
"""

import asyncio
import logging
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import monotonic

import aiohttp
from aiohttp import web

from quire_common.api_errors import MESSAGES_PATH
from quire_common.key_file import Key
from quire_common.rate_limits import Allowance, Allowances
from quire_common.routing import Hold
from quire_gateway import headers
from quire_gateway.attempt import (
    BUSY,
    GONE,
    LOST,
    UNSUITED,
    Attempts,
    Call,
    FailedAttempt,
    end_with_error,
)
from quire_gateway.bodies import Body, BodyMemory
from quire_gateway.comparisons import Comparisons
from quire_gateway.config import ProxyOptions
from quire_gateway.errors import BadRequest, GatewayError, ShuttingDown, UnknownModel, UpstreamFailed
from quire_gateway.event_stream import OpenStream, WaitComments, wait_seconds
from quire_gateway.fleet import Backend, Fleet, Pool
from quire_gateway.hold_queue import HoldQueue
from quire_gateway.limits import Charge, admitted, uploading
from quire_gateway.metrics import Metrics
from quire_gateway.prompt import PeekedRequest, peek_request
from quire_gateway.quarantine import MAX_DEATHS, Quarantine, digest_of

MODEL = web.RequestKey("model", str)
"""The key under which a request stores its model, once it is known."""
KEY = web.RequestKey("key", Key)
"""The key under which a request stores the API key that it came with, if keys are required."""
_COUNTING = frozenset({f"{MESSAGES_PATH}/count_tokens", "/tokenize", "/detokenize"})
"""Paths whose requests are not run through the model."""

_OK = 200
_LARGE_BODY_BYTES = 2**18
"""The digests of larger bodies are computed in a thread, so that other requests do not wait for them."""
_PAUSE_SECONDS = 0.25
"""The pause of a request whose replica ended, before replicas are tried again that did not accept it."""

_log = logging.getLogger(__name__)


class Proxy:
    """The forwarding of requests."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        options: ProxyOptions,
        metrics: Metrics,
        queue: HoldQueue,
        memory: BodyMemory,
        limits: Allowances,
    ) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics
        self._queue, self._memory, self._limits = queue, memory, limits
        self._attempts = Attempts(session=session, metrics=metrics, queue=queue, hides_names=options.hides_names)
        self._quarantine = Quarantine()
        self.comparisons = Comparisons(session, metrics)
        self.running: set[asyncio.Task[object]] = set()

    def cancel(self) -> None:
        """Cancel the running requests, because the drain time is over."""
        self._attempts.cancelling = True
        for request in self.running:
            request.cancel()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request from a replica of the model it names, or raise ``GatewayError``."""
        task = asyncio.current_task()
        assert task is not None
        # Registered before the body is read: a drain waits for every request that has started.
        self.running.add(task)
        try:
            return await self._forward(request)
        except asyncio.CancelledError:
            if not self._attempts.cancelling:
                raise
            task.uncancel()
            raise ShuttingDown("this gateway is shutting down", retry_after_seconds=1) from None
        finally:
            self.running.discard(task)

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        started = monotonic()
        key = request.get(KEY)
        allowance = None if key is None else self._limits.of(key)
        if allowance is not None:
            allowance.charge_request()
        body = Body(self._memory, None if key is None else key.tenant)
        try:
            with uploading(allowance):
                await body.read(request, max_bytes=self._options.max_body_bytes)
            return await self._forward_body(request, body, key, allowance, started)
        finally:
            body.release()

    async def _forward_body(
        self, request: web.Request, body: Body, key: Key | None, allowance: Allowance | None, started: float
    ) -> web.StreamResponse:
        is_generating = request.path not in _COUNTING
        tenant = None if key is None or self._options.shares_prefixes else key.tenant
        peeked = peek_request(
            body.data, is_generating=is_generating, tenant=tenant, counts_sequences=allowance is not None
        )
        pool = self._pool(peeked.model)
        request[MODEL] = pool.model
        if len(body.data) <= _LARGE_BODY_BYTES:
            digest = digest_of(request.path, body.data)
        else:
            digest = await asyncio.to_thread(digest_of, request.path, body.data)
        if (refused_seconds := self._quarantine.admit(digest, monotonic())) > 0:
            raise UpstreamFailed(
                f"replicas of {pool.model} died while they worked on requests with this body, which may be the cause; "
                f"for {math.ceil(refused_seconds)} s none is sent to a replica"
            )
        prompt_tokens = pool.prompt_tokens(peeked.num_bytes)
        request_id = headers.request_id(request)
        seconds = wait_seconds(request, is_stream=peeked.is_stream, usual_seconds=self._options.wait_comments_seconds)
        comments = None if seconds is None else WaitComments(request, seconds, request_id=request_id)
        try:
            with self._queue.ticket(pool) as ticket, _charged(allowance, peeked, prompt_tokens) as charge:
                call = Call(
                    request=request,
                    pool=pool,
                    ticket=ticket,
                    body=body,
                    digest=digest,
                    allowance=allowance,
                    charge=charge,
                    prompt_tokens=prompt_tokens,
                    blocks=peeked.blocks,
                    track=pool.choose_track(peeked.session),
                    comments=comments,
                    id=request_id,
                    started=started,
                    stream=OpenStream(body),
                )
                sample = self.comparisons.sample(
                    pool, request, body.data, prompt_tokens=prompt_tokens, request_id=request_id
                )
                try:
                    answer = await self._serve_commented(call)
                finally:
                    self.comparisons.release(sample)
            if sample is not None and answer.status == _OK:
                self.comparisons.start(sample)
            return answer
        except asyncio.CancelledError:
            if not self._attempts.cancelling:
                self._metrics.disconnects.labels(pool.model).inc()
            raise
        finally:
            if comments is not None:
                comments.cancel()
            self._metrics.duration.labels(pool.model).observe(monotonic() - started)

    async def _serve_commented(self, call: Call) -> web.StreamResponse:
        """Serve the request. If its stream has started with comments, an error becomes the last event of the stream."""
        try:
            answer = await self._serve(call)
        except GatewayError as error:
            response = await _started(call)
            if response is None:
                raise
            self._metrics.errors.labels(call.pool.model, str(error.status), error.code or error.type).inc()
            await end_with_error(call.request, response, error.body(call.request.path))
            return response
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._attempts.cancelling or task is None:
                raise
            task.uncancel()
            shutdown = ShuttingDown("this gateway is shutting down", retry_after_seconds=1)
            response = await _started(call)
            if response is None:
                raise shutdown from None
            await end_with_error(call.request, response, shutdown.body(call.request.path))
            return response
        response = await _started(call)
        if response is None or response is answer:
            return answer
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
        await end_with_error(call.request, response, answer.body)
        return response

    def _pool(self, model: str | None) -> Pool:
        """Return the replicas of a model, or of the only one if the request names none, as an engine reads it."""
        pools = self._fleet.pools
        models = [pool for pool in pools.values() if pool.adapter_of is None]
        if model is None and len(models) == 1:
            return models[0]
        if model is not None and model in pools:
            return pools[model]
        names = ", ".join(sorted(pools)) or "none"
        served = "" if self._options.hides_names else f"; served models: {names[:2000]}"
        if model is None:
            raise BadRequest(f'the body names no "model"{served}', param="model", code="missing_required_parameter")
        raise UnknownModel(f"the model {model[:200]!r} does not exist{served}")

    async def _serve(self, call: Call) -> web.StreamResponse:
        """Try one replica after the other until one answers; hold the request while none can.

        A request that was under way on a replica that died may have killed it: it is retried only once.
        """
        tried: set[str] = set()
        failure: FailedAttempt | None = None
        deaths, was_terminating = 0, False
        if self._queue.has_waiting(call.pool):
            # Requests that came first are released first.
            await call.ticket.wait(cause=None)
        while True:
            backend = self._pick(call, tried)
            if isinstance(backend, Hold):
                if (answer := await self._hold(call, failure)) is not None:
                    return answer
                tried.clear()
                continue
            sent = monotonic()
            outcome = await self._send(call, backend)
            self._queue.release(call.pool)
            if isinstance(outcome, web.StreamResponse):
                self._record_end(call, backend, outcome, sent)
                return outcome
            failure = outcome
            if failure.reason in LOST:
                if backend.endpoint.terminating and not was_terminating:
                    # Its end was planned.
                    was_terminating = True
                else:
                    deaths += 1
                    if self._record_death(call, backend, sent) or deaths >= MAX_DEATHS:
                        raise UpstreamFailed(
                            f"{MAX_DEATHS} replicas of {call.pool.model} died while they worked on requests with this "
                            "body; it is not tried again, because it may be the cause"
                        )
            if failure.reason in LOST or failure.reason == "moved":
                call.ticket.renew()
            elif failure.reason == UNSUITED and call.stream.unsuited.issuperset(call.pool.ready_ids()):
                raise UpstreamFailed(
                    f"a replica of {call.pool.model} ended while it worked on this request, and no other one can "
                    f"continue the stream: the last one {failure.cause}"
                )
            tried.add(backend.endpoint.id)
            self._metrics.retries.labels(call.pool.model, failure.reason).inc()
            _log.info("retrying request %s: replica %s %s", call.id, backend.endpoint.id, failure.cause)

    async def _send(self, call: Call, backend: Backend) -> web.StreamResponse | FailedAttempt:
        """Send the request to a replica, and again if an idle connection was closed as it was reused.

        If the replica is gone then, it died with the request.
        """
        outcome = await self._attempts.send(call, backend)
        if isinstance(outcome, FailedAttempt) and outcome.reason == "stale":
            outcome = await self._attempts.send(call, backend)
            if isinstance(outcome, FailedAttempt) and outcome.reason in GONE:
                return replace(outcome, reason="disconnected")
        return outcome

    async def _hold(self, call: Call, failure: FailedAttempt | None) -> web.Response | None:
        """Wait until a replica may accept the request; return the refusal of a full one instead.

        A request whose replica ended does not fail for full queues while it may wait.
        """
        refusal = failure.answer if failure is not None and failure.reason == "busy" else None
        if refusal is not None and not (call.ticket.is_renewed and call.ticket.has_time):
            self._metrics.errors.labels(call.pool.model, str(BUSY), "busy").inc()
            return refusal
        if call.ticket.is_renewed:
            # A replica with room may have a full queue, or be one that cannot continue the stream.
            await asyncio.sleep(_PAUSE_SECONDS)
        if refusal is None or not call.pool.has_trusted(monotonic()):
            await call.ticket.wait(cause=None if failure is None else failure.cause)
        return None

    def _record_death(self, call: Call, backend: Backend, sent: float) -> bool:
        """Record that the replica died with the request; return whether requests with its body are refused now."""
        is_refused = self._quarantine.record_death(call.digest, backend.endpoint.id, sent=sent, now=monotonic())
        if is_refused:
            _log.warning(
                "quarantined the body of request %s: replicas died with it, at last %s", call.id, backend.endpoint.id
            )
        return is_refused

    def _record_end(self, call: Call, backend: Backend, answer: web.StreamResponse, sent: float) -> None:
        """Record the end of an answer: a death that another replica could not make up for, or a complete answer."""
        if call.stream.has_died:
            if not backend.endpoint.terminating:
                self._record_death(call, backend, sent)
        elif answer.status == _OK:
            self._quarantine.record_answer(call.digest)

    def _pick(self, call: Call, tried: set[str]) -> Backend | Hold:
        unsuited = call.stream.unsuited
        # A replica that cannot continue a stream says so without any work.
        if len(tried - unsuited) >= self._options.max_attempts:
            return Hold()
        return call.pool.pick(
            prompt_tokens=call.prompt_tokens, blocks=call.blocks, exclude=tried | unsuited, track=call.current_track
        )


async def _started(call: Call) -> web.StreamResponse | None:
    """Return the response to the client if it has started."""
    if call.stream.response is not None or call.comments is None:
        return call.stream.response
    return await call.comments.stop()


def _charged(
    allowance: Allowance | None, peeked: PeekedRequest, prompt_tokens: float
) -> AbstractContextManager[Charge | None]:
    if allowance is None or not peeked.sequences:
        return nullcontext()
    return admitted(allowance, sequences=peeked.sequences, prompt_tokens=prompt_tokens)
