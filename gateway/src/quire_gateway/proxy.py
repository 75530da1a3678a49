"""The way of one request: read → model → pick → attempt; another replica is tried only before the first byte.

Under ``app``, which routes to ``Proxy.handle``. A request is held while no replica can serve it.
"""

import asyncio
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import monotonic

import aiohttp
from aiohttp import web

from quire_common.allowance import Allowance, Allowances
from quire_common.anthropic_error import MESSAGES_PATH
from quire_common.key_file import Key
from quire_common.routing.balance import Hold
from quire_gateway import headers
from quire_gateway.attempt import Attempts, end_with_error
from quire_gateway.bodies import Body, BodyMemory
from quire_gateway.call import Call
from quire_gateway.comparisons import Comparisons
from quire_gateway.config import ProxyOptions
from quire_gateway.errors import BadRequest, GatewayError, ShuttingDown, UnknownModel, UpstreamFailed
from quire_gateway.failed_attempts import BUSY, UNSUITED, FailedAttempt
from quire_gateway.fleet import Backend, Fleet, Pool
from quire_gateway.hold_queue import HoldQueue
from quire_gateway.limits import Charge, admitted, uploading
from quire_gateway.metrics import Metrics
from quire_gateway.prompt import PeekedRequest, peek_request
from quire_gateway.resumable import OpenStream
from quire_gateway.trial_queue import TrialQueue
from quire_gateway.trials import Losses, Step
from quire_gateway.wait_comments import WaitComments, wait_seconds

MODEL = web.RequestKey("model", str)
"""The key under which a request stores its model, once it is known."""
KEY = web.RequestKey("key", Key)
"""The key under which a request stores the API key that it came with, if keys are required."""
_COUNTING = frozenset({f"{MESSAGES_PATH}/count_tokens", "/tokenize", "/detokenize"})
"""Paths whose requests are not run through the model."""

_OK = 200

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
        trials: TrialQueue,
        memory: BodyMemory,
        limits: Allowances,
    ) -> None:
        self._fleet, self._options, self._metrics = fleet, options, metrics
        self._queue, self._trials, self._memory, self._limits = queue, trials, memory, limits
        self._attempts = Attempts(session=session, metrics=metrics, queue=queue, hides_names=options.hides_names)
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

        A request that was under way on a replica that died may have killed it: it is tried once more, and alone.
        """
        tried: set[str] = set()
        failure: FailedAttempt | None = None
        losses, step = Losses(), Step.OTHER_REPLICA
        backend: Backend | None = None
        if self._queue.has_waiting(call.pool):
            # Requests that came first are released first.
            await call.ticket.wait(cause=None)
        while step not in (Step.TRIAL, Step.RESUME):
            if step is not Step.SAME_REPLICA or backend is None:
                choice = self._pick(call, tried)
                if isinstance(choice, Hold):
                    if call.stream.response is not None:
                        # It was moved, and waits with the lost ones for a replica with room.
                        break
                    if failure is not None and failure.reason == "busy" and failure.answer is not None:
                        self._metrics.errors.labels(call.pool.model, str(BUSY), failure.reason).inc()
                        return failure.answer
                    await call.ticket.wait(cause=None if failure is None else failure.cause)
                    tried.clear()
                    continue
                backend = choice
            outcome = await self._attempts.send(call, backend)
            self._queue.release(call.pool)
            if isinstance(outcome, web.StreamResponse):
                return outcome
            losses, step = _after(losses, call, backend, outcome)
            if step is not Step.SAME_REPLICA:
                failure = outcome
                tried.add(backend.endpoint.id)
                self._record_retry(call, backend, outcome)
        return await self._serve_lost(call, losses)

    async def _serve_lost(self, call: Call, losses: Losses) -> web.StreamResponse:
        """Try a request that was lost once more, when no other one that was lost is tried on the same replica.

        Streams that had tokens go on together the first time.
        """
        call.ticket.close()
        together = losses.trial(has_tokens=call.stream.has_tokens) is Step.RESUME
        with self._trials.enter(
            call.pool,
            track=call.current_track,
            together=together,
            unsuited=call.stream.unsuited,
        ) as trial:
            call = replace(call, trial=trial)
            while (backend := await trial.turn()) is not None:
                call.pool.record_sent(backend, prompt_tokens=call.prompt_tokens, blocks=call.blocks)
                outcome = await self._attempts.send(call, backend)
                while not isinstance(outcome, web.StreamResponse):
                    losses, step = _after(losses, call, backend, outcome)
                    if step is Step.FAIL:
                        raise UpstreamFailed(
                            f"{losses.count} replicas of {call.pool.model} died while they worked on this request; it "
                            "is not tried again, because it may be the cause"
                        )
                    self._record_retry(call, backend, outcome)
                    if step is not Step.SAME_REPLICA:
                        break
                    outcome = await self._attempts.send(call, backend)
                else:
                    return outcome
                together = losses.trial(has_tokens=call.stream.has_tokens) is Step.RESUME
                trial.refused(backend, together=together, accepts_others=outcome.reason == UNSUITED)
            raise UpstreamFailed(
                f"a replica of {call.pool.model} ended while it worked on this request, and none could try it alone "
                f"within {self._queue.timeout_seconds(call.pool):g} s"
            )

    def _record_retry(self, call: Call, backend: Backend, failure: FailedAttempt) -> None:
        self._metrics.retries.labels(call.pool.model, failure.reason).inc()
        _log.info("retrying request %s: replica %s %s", call.id, backend.endpoint.id, failure.cause)

    def _pick(self, call: Call, tried: set[str]) -> Backend | Hold:
        unsuited = call.stream.unsuited
        # A replica that cannot continue a stream says so without any work.
        if len(tried - unsuited) >= self._options.max_attempts:
            return Hold()
        tried = tried | unsuited
        choice: Backend | Hold = Hold()
        if avoided := self._trials.avoided(call.pool):
            choice = self._pick_from(call, tried | avoided)
        if isinstance(choice, Hold):
            choice = self._pick_from(call, tried)
        return choice

    def _pick_from(self, call: Call, exclude: set[str]) -> Backend | Hold:
        return call.pool.pick(
            prompt_tokens=call.prompt_tokens, blocks=call.blocks, exclude=exclude, track=call.current_track
        )


def _after(losses: Losses, call: Call, backend: Backend, failed: FailedAttempt) -> tuple[Losses, Step]:
    """Return the losses and the next step. Raise ``UpstreamFailed`` if no ready replica can continue the stream."""
    if failed.reason == UNSUITED and call.stream.unsuited.issuperset(call.pool.ready_ids()):
        raise UpstreamFailed(
            f"a replica of {call.pool.model} ended while it worked on this request, and no other one can continue the "
            f"stream: the last one {failed.cause}"
        )
    terminating = backend.endpoint.terminating
    return losses.after(failed.reason, terminating=terminating, has_tokens=call.stream.has_tokens)


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
