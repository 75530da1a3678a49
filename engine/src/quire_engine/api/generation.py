"""The answers to one HTTP request: its sequences are submitted, followed and ended in every case.

The queue has a bound, and a drain refuses new requests.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, Self

from quire_common.contract.engine import QUEUE_FULL
from quire_engine.api.auth import ANONYMOUS, Identity
from quire_engine.api.metrics import Metrics, RequestTimes
from quire_engine.api.output import Choice, Delta
from quire_engine.api.tracing import (
    SequenceRecord,
    Span,
    generation_attributes,
    milestone,
)
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest, Overloaded, RequestError, Unavailable
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.stream import Stream

DRAIN_RETRY_SECONDS = 5


class Failable(Protocol):
    """A request that is being answered."""

    def fail(self, error: RequestError) -> None:
        """End the request with this error."""


class Lifecycle:
    """The requests that are being answered, and the drain. Only for the event loop."""

    def __init__(self) -> None:
        self.draining = False
        self._in_flight: set[Failable] = set()
        self._changed = asyncio.Event()

    @property
    def in_flight(self) -> int:
        """The number of requests that are being answered."""
        return len(self._in_flight)

    def check_open(self) -> None:
        """Raise Unavailable during the drain."""
        if self.draining:
            raise Unavailable(
                "this server is draining and accepts no new requests; another replica may accept them",
                code="draining",
                retry_after_seconds=DRAIN_RETRY_SECONDS,
            )

    def track(self, request: Failable) -> Callable[[], None]:
        """Count a request as being answered, until the returned function is called."""
        self._in_flight.add(request)

        def untrack() -> None:
            self._in_flight.discard(request)
            self._changed.set()

        return untrack

    def begin_drain(self) -> None:
        """Accept no new requests from now on."""
        self.draining = True
        self._changed.set()

    async def drained(self) -> None:
        """Return once the drain has started and no request is being answered any more."""
        while not self.draining or self._in_flight:
            self._changed.clear()
            await self._changed.wait()

    def fail_all(self, error: RequestError) -> None:
        """End every request that is still being answered with this error."""
        for request in tuple(self._in_flight):
            request.fail(error)


_WINDOW_SECONDS = 30.0
_DEFAULT_RETRY_SECONDS = 10
_MAX_SECONDS = 120


@dataclass(frozen=True, slots=True)
class _Departure:
    time: float
    tokens: int


class QueueLimit:
    """A counter of queued sequences and prompt tokens with a bound for each.

    ``reserve`` precedes the submission of sequences; ``release`` follows for each when it first runs, or when it ends
    without having run.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self.max_tokens = max_tokens
        """The bound in prompt tokens; the server sets it again once the size of the KV cache is known."""
        self._departures: deque[_Departure] = deque()
        self.requests = 0
        self.tokens = 0

    def check_count(self, requests: int) -> None:
        """Raise InvalidRequest for more sequences than an empty queue accepts."""
        if requests > self._max_requests:
            raise InvalidRequest(
                f"{requests} sequences (prompts times n) exceed the {self._max_requests} that may be queued "
                "(--max-queued-requests); send them in several requests"
            )

    def reserve(self, prompt_lengths: list[int], now: float) -> None:
        """Count sequences as queued. Raises Overloaded, InvalidRequest.

        An empty queue accepts prompts of any length: the engine itself refuses a prompt that can never run.
        """
        requests, tokens = len(prompt_lengths), sum(prompt_lengths)
        self.check_count(requests)
        over_requests = self.requests + requests - self._max_requests
        over_tokens = self.tokens + tokens - self.max_tokens if self.requests else 0
        if over_requests > 0 or over_tokens > 0:
            seconds = self._seconds_until_room(over_requests, over_tokens, now)
            raise Overloaded(
                f"the queue is full: {self.requests} sequences with {self.tokens} prompt tokens are queued "
                f"(limits: {self._max_requests} and {self.max_tokens}); try again in {seconds} s",
                code=QUEUE_FULL,
                retry_after_seconds=seconds,
            )
        self.requests += requests
        self.tokens += tokens

    def release(self, prompt_length: int, now: float, *, ran: bool) -> None:
        """Count one sequence as no longer queued; only one that ``ran`` counts for the rate."""
        self.requests -= 1
        self.tokens -= prompt_length
        assert self.requests >= 0 and self.tokens >= 0, "more sequences released than reserved"
        if ran:
            self._departures.append(_Departure(now, prompt_length))
            self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._departures and self._departures[0].time < now - _WINDOW_SECONDS:
            self._departures.popleft()

    def _seconds_until_room(self, over_requests: int, over_tokens: int, now: float) -> int:
        """Estimate the wait from the rate at which sequences and tokens left the queue in the last 30 seconds."""
        self._drop_old(now)
        if not self._departures:
            return _DEFAULT_RETRY_SECONDS
        span = max(1.0, now - self._departures[0].time)
        by_requests = over_requests * span / len(self._departures)
        by_tokens = over_tokens * span / max(1, sum(each.tokens for each in self._departures))
        return min(_MAX_SECONDS, max(1, math.ceil(max(by_requests, by_tokens))))


_QUEUE_RETRY_SECONDS = 5


class ClientGone(Exception):
    """The client has closed the connection, so no answer can be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The properties of a request other than its sampling."""

    arrival_time: float
    priority: int = 0
    identity: Identity = ANONYMOUS
    cache_salt: str | None = None
    adapter: int | None = None
    """The number of the adapter; None for the model itself."""
    output_token_ids: Sequence[int] = ()
    """The tokens of its only answer that another engine has sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerServices:
    """The services of the server that every generation uses and reports to."""

    engine: EngineClient
    metrics: Metrics
    queue: QueueLimit
    lifecycle: Lifecycle
    now: Callable[[], float]
    max_queue_seconds: float | None = None


@dataclass(slots=True)
class _Run:
    """One sequence that waits, runs or has ended."""

    choice: Choice
    sampling: SamplingParams
    stream: Stream
    times: RequestTimes
    waiting: bool = True
    ended: str | None = None
    """The finish reason; None while it waits or runs."""


class Generation:
    """The sequences of one HTTP request. ``fail`` and ``abandon`` may be called at any time from the event loop."""

    def __init__(self, services: ServerServices, runs: list[_Run], identity: Identity) -> None:
        self._services = services
        self._runs = runs
        self._num_unfinished = len(runs)
        self._allowance = identity.allowance
        self._span = identity.span
        self._stop: RequestError | ClientGone | None = None
        self._iterator = self._deltas()
        self._pumps: list[asyncio.Task[None]] = []
        self._untrack = services.lifecycle.track(self)
        self._deadline: asyncio.TimerHandle | None = None
        if services.max_queue_seconds is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(services.max_queue_seconds, self._fail_if_queued)

    @property
    def choices(self) -> list[Choice]:
        """The answers, in the order of their index."""
        return [run.choice for run in self._runs]

    async def first(self) -> list[Delta]:
        """Return the first deltas. Raises RequestError, ClientGone."""
        return await anext(self._iterator, [])

    def deltas(self) -> AsyncIterator[list[Delta]]:
        """Return the deltas that follow. Raises RequestError where the generation fails, ClientGone."""
        return self._iterator

    def fail(self, error: RequestError) -> None:
        """End every sequence; the reader gets this error."""
        self._end_with(error)

    def abandon(self) -> None:
        """End every sequence, because the client has gone."""
        self._end_with(ClientGone())

    def _end_with(self, reason: RequestError | ClientGone) -> None:
        if self._stop is None:
            self._stop = reason
            self._cancel_all()

    def _cancel_all(self) -> None:
        for run in self._runs:
            if not run.ended:
                run.stream.cancel()

    def _fail_if_queued(self) -> None:
        if all(run.waiting and not run.ended for run in self._runs):
            self._services.metrics.rejected["queue_time"] += 1
            seconds = self._services.max_queue_seconds
            self.fail(
                Unavailable(
                    f"the request was still queued after {seconds:g} s (--max-queue-time)",
                    code="queue_timeout",
                    retry_after_seconds=_QUEUE_RETRY_SECONDS,
                )
            )

    def close(self) -> None:
        """Release everything, after the last delta or instead of it. Further calls have no effect."""
        self._untrack()
        if self._deadline is not None:
            self._deadline.cancel()
        for pump in self._pumps:
            pump.cancel()
        self._cancel_all()
        reason = "error" if isinstance(self._stop, RequestError) else "abort"
        for run in self._runs:
            if not run.ended:
                self._finish(run, reason)
        if self._span is not None:
            self._record(self._span)
            self._span = None

    def _record(self, span: Span) -> None:
        records = [
            SequenceRecord(
                times=run.times,
                generated_tokens=run.choice.num_tokens,
                finish_reason=run.ended or "abort",
            )
            for run in self._runs
        ]
        model, prompt_tokens = self._services.metrics.model_name, _prompt_tokens(self.choices)
        sampling = self._runs[0].sampling
        span.set_attributes(generation_attributes(model, sampling, records, prompt_tokens, self._services.now()))
        times = [run.times for run in self._runs]
        for name in ("first_scheduled", "first_token"):
            if (time := milestone(times, name)) is not None:
                span.event(name, time)

    # --- updates from the engine ---

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        first, *others = self._runs
        merged = self._merged_runs() if others else None
        try:
            while True:
                if merged is None:
                    await first.stream.wait()
                batch = [first] if merged is None else await anext(merged)
                deltas = [delta for run in batch if (delta := self._grown(run)) is not None]
                if deltas:
                    yield deltas
                if not self._num_unfinished:
                    return
        except RequestError as error:
            self._stop = self._stop or error
            raise

    async def _merged_runs(self) -> AsyncIterator[list[_Run]]:
        # Bounded, because a sequence that a slow client does not read has new output again and again.
        queue: asyncio.Queue[_Run | Exception] = asyncio.Queue(len(self._runs))
        self._pumps = [asyncio.create_task(_pump(run, queue)) for run in self._runs]
        while True:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            # What other sequences sampled before one of them failed still counts.
            yield [item for item in items if not isinstance(item, Exception)]
            for item in items:
                if isinstance(item, Exception):
                    raise item

    def _grown(self, run: _Run) -> Delta | None:
        """Return what the unread output of a sequence adds to its answer."""
        if self._stop is not None:
            raise self._stop
        if run.ended:
            return None
        token_ids, logprobs = run.stream.read()
        self._record_times(run, len(token_ids), self._services.now())
        counted, finished = run.choice.num_tokens, run.stream.finished
        delta = run.choice.append_tokens(token_ids, logprobs, finished)
        if self._allowance is not None:
            self._allowance.charge_tokens(run.choice.num_tokens - counted)
        if run.choice.finish_reason is not None:
            if finished is None:  # by a stop string, of which the engine knows nothing
                run.stream.cancel()
            self._finish(run, run.choice.finish_reason)
        elif finished is not None:
            raise Unavailable("the engine aborted this request", code="aborted")
        return delta

    def _record_times(self, run: _Run, num_tokens: int, now: float) -> None:
        if run.waiting and (num_tokens or run.stream.first_scheduled_time is not None):
            run.waiting = False
            run.times.first_scheduled = run.stream.first_scheduled_time
            run.choice.num_cached_tokens = run.stream.num_cached_tokens
            self._services.queue.release(len(run.choice.prompt_token_ids), now, ran=True)
        if not num_tokens:
            return
        if run.times.first_token is None:
            self._services.metrics.first_token(run.times, now)
        else:
            self._services.metrics.next_tokens(run.times, num_tokens, now)

    def _finish(self, run: _Run, reason: str) -> None:
        run.ended = reason
        self._num_unfinished -= 1
        now = self._services.now()
        prompt = len(run.choice.prompt_token_ids)
        if run.waiting:
            run.waiting = False
            self._services.queue.release(prompt, now, ran=False)
        if self._allowance is not None:
            self._allowance.release(1)
        self._services.metrics.request_finished(run.times, reason, prompt, run.choice.num_tokens, now)


async def _pump(run: _Run, queue: "asyncio.Queue[_Run | Exception]") -> None:
    try:
        while not run.ended:
            await run.stream.wait()
            await queue.put(run)
            if run.stream.finished is not None:
                return
    except Exception as error:  # the reader of the queue raises it
        await queue.put(error)


class Preparation:
    """The place of a request in the queue while its prompts are rendered and encoded, until ``submit`` or ``end``.

    So a request that the queue or its key does not accept costs neither, and those that are prepared are bounded.
    Raises Overloaded, InvalidRequest, Unavailable.
    """

    def __init__(self, services: ServerServices, identity: Identity, prompt_lengths: list[int]) -> None:
        """``prompt_lengths`` has for each sequence the least number of tokens that its prompt can have."""
        self._services = services
        self._allowance = identity.allowance
        self._lengths = prompt_lengths
        services.lifecycle.check_open()
        if self._allowance is not None:
            with _counted_as(services, "key_limit"):
                self._allowance.charge_sequences(len(prompt_lengths), 0)
        try:
            with _counted_as(services, "queue_full"):
                services.queue.reserve(prompt_lengths, services.now())
        except Exception:
            if self._allowance is not None:
                self._allowance.release(len(prompt_lengths))
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave the queue. Further calls have no effect."""
        lengths, self._lengths = self._lengths, []
        for length in lengths:
            self._services.queue.release(length, self._services.now(), ran=False)
        if self._allowance is not None and lengths:
            self._allowance.release(len(lengths))


def submit(
    services: ServerServices,
    choices: Sequence[Choice],
    params: Sequence[SamplingParams],
    routing: Routing,
    preparation: Preparation | None = None,
) -> Generation:
    """Send the sequences to the engine, all or none. Raises Overloaded, InvalidRequest, Unavailable.

    They take the place of the request's ``preparation``.
    """
    if preparation is not None:
        preparation.end()
    services.lifecycle.check_open()
    now = services.now()
    allowance = routing.identity.allowance
    lengths = [len(choice.prompt_token_ids) for choice in choices]
    prompt_tokens = _prompt_tokens(choices)
    if allowance is not None:
        with _counted_as(services, "key_limit"):
            allowance.charge_sequences(len(choices), prompt_tokens)
    try:
        with _counted_as(services, "queue_full"):
            services.queue.reserve(lengths, now)
        try:
            runs = _submit_all(services, choices, params, routing)
        except Exception:
            for length in lengths:
                services.queue.release(length, now, ran=False)
            raise
    except Exception:
        if allowance is not None:
            allowance.refund(len(choices), prompt_tokens)
        raise
    for length in lengths:
        services.metrics.arrived(length)
    return Generation(services, runs, routing.identity)


def _prompt_tokens(choices: Sequence[Choice]) -> int:
    """Return the number of prompt tokens, as the usage reports it: a prompt counts once, however many answers it has.

    Answers to one prompt hold the same list.
    """
    return sum({id(choice.prompt_token_ids): len(choice.prompt_token_ids) for choice in choices}.values())


@contextmanager
def _counted_as(services: ServerServices, reason: str) -> Iterator[None]:
    """Count refusals under ``reason``; more sequences than could ever run are the client's mistake at any load."""
    try:
        yield
    except RequestError as error:
        services.metrics.rejected[reason if error.status == 429 else "too_many_sequences"] += 1
        raise


def _submit_all(
    services: ServerServices, choices: Sequence[Choice], params: Sequence[SamplingParams], routing: Routing
) -> list[_Run]:
    """Submit all sequences, or none: the engine may have gone away since the request came in."""
    runs: list[_Run] = []
    first_of: dict[int, int] = {}  # by the identity of the prompt's list: the engine computes a shared prompt once
    try:
        for choice, sampling in zip(choices, params, strict=True):
            stream = services.engine.submit(
                choice.prompt_token_ids,
                sampling,
                priority=routing.priority,
                tenant=routing.identity.tenant,
                gateway_tenant=routing.identity.gateway_tenant,
                cache_salt=routing.cache_salt,
                parent=first_of.get(id(choice.prompt_token_ids)),
                adapter=routing.adapter,
                output_token_ids=routing.output_token_ids,
            )
            first_of.setdefault(id(choice.prompt_token_ids), stream.key)
            # The stream appends to them.
            choice.prompt_logprobs, choice.pooled = stream.prompt_logprobs, stream.pooled
            runs.append(_Run(choice, sampling, stream, RequestTimes(routing.arrival_time)))
    except Exception:
        for run in runs:
            run.stream.cancel()
        raise
    return runs
