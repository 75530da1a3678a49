"""The way of one request: read → model → pick → attempt; another replica is tried only before the first byte.

Under ``app``, which routes to ``Proxy.handle``. A request is held while no replica can serve it.
"""

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from time import monotonic

import aiohttp
from aiohttp import web

from quire_common.anthropic_error import MESSAGES_PATH
from quire_common.key_file import Key
from quire_common.routing.balance import Hold
from quire_gateway import headers
from quire_gateway.attempt import BUSY, Attempts, Call, FailedAttempt, end_with_error
from quire_gateway.bodies import Body, BodyMemory
from quire_gateway.config import ProxyOptions
from quire_gateway.errors import (
    BadRequest,
    GatewayError,
    ShuttingDown,
    UnknownModel,
    UpstreamFailed,
)
from quire_gateway.fleet import Backend, Fleet, Pool
from quire_gateway.hold_queue import HoldQueue
from quire_gateway.limits import Allowance, Charge, Limits
from quire_gateway.metrics import Metrics
from quire_gateway.prompt import PeekedRequest, peek_request
from quire_gateway.wait_comments import WaitComments, wait_seconds

MODEL = web.RequestKey("model", str)
"""The key under which a request stores its model, once it is known."""
KEY = web.RequestKey("key", Key)
"""The key under which a request stores the API key that it came with, if keys are required."""
_GENERATING = "/v1/"
_COUNTING = frozenset({f"{MESSAGES_PATH}/count_tokens"})
"""Paths below it whose requests are not run through the model."""
_LOST = frozenset({"stale", "disconnected", "engine_stopped"})
"""The reasons of attempts that may have been under way when the replica, or its engine process, died."""
_MAX_LOST_ATTEMPTS = 2
"""The number of such attempts after which a request fails, because it may be what kills replicas."""

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
        limits: Limits,
    ) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics
        self._queue, self._memory, self._limits = queue, memory, limits
        self._attempts = Attempts(session=session, metrics=metrics, queue=queue, hides_names=options.hides_names)
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
        body = Body(self._memory)
        try:
            await body.read(request, max_bytes=self._options.max_body_bytes)
            return await self._forward_body(request, body, key, allowance, started)
        finally:
            body.release()

    async def _forward_body(
        self, request: web.Request, body: Body, key: Key | None, allowance: Allowance | None, started: float
    ) -> web.StreamResponse:
        is_generating = request.path.startswith(_GENERATING) and request.path not in _COUNTING
        tenant = None if key is None or self._options.shares_prefixes else key.tenant
        peeked = peek_request(
            body.data, is_generating=is_generating, tenant=tenant, counts_sequences=allowance is not None
        )
        pool = self._pool(peeked.model)
        request[MODEL] = pool.model
        prompt_tokens = pool.prompt_tokens(peeked.num_bytes)
        request_id = headers.request_id(request.headers)
        seconds = wait_seconds(request, is_stream=peeked.is_stream)
        comments = None if seconds is None else WaitComments(request, seconds, request_id=request_id)
        try:
            with self._queue.ticket(pool) as ticket, _charged(allowance, peeked, prompt_tokens) as charge:
                call = Call(
                    request=request,
                    pool=pool,
                    ticket=ticket,
                    body=body,
                    allowance=allowance,
                    charge=charge,
                    prompt_tokens=prompt_tokens,
                    blocks=peeked.blocks,
                    comments=comments,
                    id=request_id,
                    started=started,
                )
                return await self._serve_commented(call)
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
            response = None if call.comments is None else await call.comments.stop()
            if response is None:
                raise
            self._metrics.errors.labels(call.pool.model, str(error.status), error.code or error.type).inc()
            await end_with_error(call.request, response, error.body(call.request.path))
            return response
        response = None if call.comments is None else await call.comments.stop()
        if response is None or response is answer:
            return answer
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
        await end_with_error(call.request, response, answer.body)
        return response

    def _pool(self, model: str | None) -> Pool:
        """Return the replicas of a model, or of the only one if the request names none, as an engine reads it."""
        pools = self._fleet.pools
        if model is None and len(pools) == 1:
            return next(iter(pools.values()))
        if model is not None and model in pools:
            return pools[model]
        names = ", ".join(sorted(pools)) or "none"
        served = "" if self._options.hides_names else f"; served models: {names[:2000]}"
        if model is None:
            raise BadRequest(f'the body names no "model"{served}', param="model", code="missing_required_parameter")
        raise UnknownModel(f"the model {model[:200]!r} does not exist{served}")

    async def _serve(self, call: Call) -> web.StreamResponse:
        """Try one replica after the other until one answers; hold the request while none can.

        A request that was under way on a replica that died may have killed it. It is tried on one other replica at
        most, and it is not held until a replica is ready again.
        """
        tried: set[str] = set()
        failure: FailedAttempt | None = None
        lost = 0
        is_suspect = stale = False
        if self._queue.has_waiting(call.pool):
            # Requests that came first are released first.
            await call.ticket.wait(cause=None)
        while True:
            choice = self._pick(call, tried)
            if isinstance(choice, Hold):
                if failure is not None and failure.reason == "busy" and failure.answer is not None:
                    self._metrics.errors.labels(call.pool.model, str(BUSY), failure.reason).inc()
                    return failure.answer
                if is_suspect:
                    raise UpstreamFailed(
                        f"a replica of {call.pool.model} died while it worked on this request, and no other replica "
                        "is ready; the request is not tried again, because it may be the cause"
                    )
                await call.ticket.wait(cause=None if failure is None else failure.cause)
                tried.clear()
                continue
            outcome = await self._attempts.send(call, choice)
            self._queue.release(call.pool)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            lost += outcome.reason in _LOST
            if lost == _MAX_LOST_ATTEMPTS:
                raise UpstreamFailed(
                    f"two replicas of {call.pool.model} died while they worked on this request; the request is not "
                    "tried again, because it may be the cause"
                )
            if outcome.reason == "stale" and not stale:
                stale = True
                continue
            is_suspect |= outcome.reason in _LOST
            failure = outcome
            tried.add(choice.endpoint.id)
            self._metrics.retries.labels(call.pool.model, outcome.reason).inc()
            _log.info("retrying request %s: replica %s %s", call.id, choice.endpoint.id, outcome.cause)

    def _pick(self, call: Call, tried: set[str]) -> Backend | Hold:
        if len(tried) >= self._options.max_attempts:
            return Hold()
        return call.pool.pick(prompt_tokens=call.prompt_tokens, blocks=call.blocks, exclude=tried)


def _charged(
    allowance: Allowance | None, peeked: PeekedRequest, prompt_tokens: float
) -> AbstractContextManager[Charge | None]:
    if allowance is None or not peeked.sequences:
        return nullcontext()
    return allowance.admit(sequences=peeked.sequences, prompt_tokens=prompt_tokens)
