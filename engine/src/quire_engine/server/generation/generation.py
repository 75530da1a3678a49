"""One HTTP request's answers: its sequences submitted, followed and ended, whatever happens to client or engine.

``submit`` starts one; the route awaits ``first`` (so that what the engine refuses is still an HTTP status), then reads
``deltas`` to the end, and calls ``close`` in any case: what still runs is cancelled on the engine. Metrics, admission
and the drain learn of requests from here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import RequestError, Unavailable
from quire_engine.ipc.client import EngineService, TokenStream
from quire_engine.ipc.stream import Update
from quire_engine.server.auth.access import ANYBODY, Caller
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.generation.lifecycle import Lifecycle
from quire_engine.server.generation.queue_limit import Admission
from quire_engine.server.observability.metrics import Metrics, RequestTimes
from quire_engine.server.observability.tracing import SequenceRecord, Span, generation_attributes, milestone

_QUEUE_RETRY_SECONDS = 5


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How the engine treats the request, beside its sampling."""

    arrival_time: float
    priority: int = 0
    caller: Caller = ANYBODY
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """What every generation reports to."""

    engine: EngineService
    metrics: Metrics
    admission: Admission
    lifecycle: Lifecycle
    now: Callable[[], float]
    max_queue_seconds: float | None = None


@dataclass(slots=True)
class _Run:
    """One sequence under way."""

    choice: Choice
    sampling: SamplingParams
    stream: TokenStream
    times: RequestTimes
    waiting: bool = True
    ended: str | None = None
    """For which reason."""


class Generation:
    """Made by ``submit``. ``fail`` and ``abandon`` may come at any time, from the event loop."""

    def __init__(self, desk: Desk, runs: list[_Run], caller: Caller) -> None:
        self._desk = desk
        self._runs = runs
        self._under_way = len(runs)
        self._allowance = caller.allowance
        self._span = caller.span
        self._stop: RequestError | ClientGone | None = None
        self._iterator = self._deltas()
        self._pumps: list[asyncio.Task[None]] = []
        self._untrack = desk.lifecycle.track(self)
        self._deadline: asyncio.TimerHandle | None = None
        if desk.max_queue_seconds is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(desk.max_queue_seconds, self._waited_too_long)

    @property
    def choices(self) -> list[Choice]:
        return [run.choice for run in self._runs]

    async def first(self) -> list[Delta]:
        """The first deltas. Raises RequestError, ClientGone."""
        return await anext(self._iterator, [])

    def deltas(self) -> AsyncIterator[list[Delta]]:
        """What follows. Raises RequestError where it breaks off, ClientGone."""
        return self._iterator

    def fail(self, error: RequestError) -> None:
        self._end_with(error)

    def abandon(self) -> None:
        self._end_with(ClientGone())

    def _end_with(self, reason: RequestError | ClientGone) -> None:
        if self._stop is None:
            self._stop = reason
            self._cancel_all()

    def _cancel_all(self) -> None:
        for run in self._runs:
            if not run.ended:
                run.stream.cancel()

    def _waited_too_long(self) -> None:
        if any(run.waiting and not run.ended for run in self._runs):
            self._desk.metrics.rejected["queue_time"] += 1
            seconds = self._desk.max_queue_seconds
            self.fail(
                Unavailable(
                    f"the request waited {seconds:g} s without a place to run (--max-queue-time)",
                    code="queue_timeout",
                    retry_after_seconds=_QUEUE_RETRY_SECONDS,
                )
            )

    def close(self) -> None:
        """After the last delta, or instead of it. May be called again."""
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
            self._tell(self._span)
            self._span = None

    def _tell(self, span: Span) -> None:
        records = [
            SequenceRecord(
                times=run.times,
                generated_tokens=run.choice.num_tokens,
                finish_reason=run.ended or "abort",
            )
            for run in self._runs
        ]
        model, prompt_tokens = self._desk.metrics.model_name, _prompt_tokens(self.choices)
        sampling = self._runs[0].sampling
        span.add(generation_attributes(model, sampling, records, prompt_tokens, self._desk.now()))
        times = [run.times for run in self._runs]
        for name in ("first_scheduled", "first_token"):
            if (time := milestone(times, name)) is not None:
                span.event(name, time)

    # --- what the engine says ---

    async def _deltas(self) -> AsyncIterator[list[Delta]]:
        first, *others = self._runs
        of_many = self._of_many() if others else None
        try:
            while True:
                batch = [(first, await first.stream.read())] if of_many is None else await anext(of_many)
                deltas = [delta for run, update in batch if (delta := self._take(run, update)) is not None]
                if deltas:
                    yield deltas
                if not self._under_way:
                    return
        except RequestError as error:
            self._stop = self._stop or error
            raise

    async def _of_many(self) -> AsyncIterator[list[tuple[_Run, Update]]]:
        # Bounded, so that what a slow client leaves unread waits in the streams, which bound it.
        queue: asyncio.Queue[tuple[_Run, Update] | Exception] = asyncio.Queue(len(self._runs))
        self._pumps = [asyncio.create_task(_pump(run, queue)) for run in self._runs]
        while True:
            items = [await queue.get()]
            while not queue.empty():
                items.append(queue.get_nowait())
            # What others drew before one of them failed still counts.
            yield [item for item in items if not isinstance(item, Exception)]
            for item in items:
                if isinstance(item, Exception):
                    raise item

    def _take(self, run: _Run, update: Update) -> Delta | None:
        if self._stop is not None:
            raise self._stop
        if run.ended:
            return None
        now = self._desk.now()
        self._note_times(run, update, now)
        counted = run.choice.num_tokens
        if update.prompt_logprobs is not None:
            run.choice.prompt_logprobs += update.prompt_logprobs
        delta = run.choice.take(update.token_ids, update.logprobs, update.finished)
        if self._allowance is not None:
            self._allowance.use_tokens(run.choice.num_tokens - counted)
        if run.choice.finish_reason is not None:
            if update.finished is None:  # by a stop string, which the engine does not know of
                run.stream.cancel()
            self._finish(run, run.choice.finish_reason)
        elif update.finished is not None:
            raise Unavailable("the engine gave this request up", code="aborted")
        return delta

    def _note_times(self, run: _Run, update: Update, now: float) -> None:
        if update.first_scheduled_time is not None:
            run.times.first_scheduled = update.first_scheduled_time
        if run.waiting and (update.first_scheduled_time is not None or update.token_ids):
            run.waiting = False
            self._desk.admission.leave(len(run.choice.prompt_token_ids), now, ran=True)
        if not update.token_ids:
            return
        if run.times.first_token is None:
            self._desk.metrics.first_token(run.times, now)
        else:
            self._desk.metrics.next_tokens(run.times, len(update.token_ids), now)

    def _finish(self, run: _Run, reason: str) -> None:
        run.ended = reason
        self._under_way -= 1
        now = self._desk.now()
        prompt = len(run.choice.prompt_token_ids)
        if run.waiting:
            run.waiting = False
            self._desk.admission.leave(prompt, now, ran=False)
        if self._allowance is not None:
            self._allowance.leave(1)
        self._desk.metrics.request_finished(run.times, reason, prompt, run.choice.num_tokens, now)


async def _pump(run: _Run, queue: "asyncio.Queue[tuple[_Run, Update] | Exception]") -> None:
    try:
        while not run.ended:
            update = await run.stream.read()
            await queue.put((run, update))
            if update.finished is not None:
                return
    except Exception as error:  # told to the reader of the queue, who raises it
        await queue.put(error)


def submit(desk: Desk, choices: Sequence[Choice], params: Sequence[SamplingParams], routing: Routing) -> Generation:
    """Send the sequences to the engine. Raises Overloaded, InvalidRequest, Unavailable before any is sent."""
    desk.lifecycle.check_open()
    now = desk.now()
    allowance = routing.caller.allowance
    lengths = [len(choice.prompt_token_ids) for choice in choices]
    prompt_tokens = _prompt_tokens(choices)
    if allowance is not None:
        with _counted_as(desk, "key_limit"):
            allowance.take_work(len(choices), prompt_tokens)
    try:
        with _counted_as(desk, "queue_full"):
            desk.admission.enter(lengths, now)
        try:
            runs = _sent(desk, choices, params, routing)
        except Exception:
            for length in lengths:
                desk.admission.leave(length, now, ran=False)
            raise
    except Exception:
        if allowance is not None:
            allowance.give_back(len(choices), prompt_tokens)
        raise
    for length in lengths:
        desk.metrics.arrived(length)
    return Generation(desk, runs, routing.caller)


def _prompt_tokens(choices: Sequence[Choice]) -> int:
    """Several answers to one prompt hold the same list: it counts once, as in the usage that clients are told."""
    return sum({id(choice.prompt_token_ids): len(choice.prompt_token_ids) for choice in choices}.values())


@contextmanager
def _counted_as(desk: Desk, reason: str) -> Iterator[None]:
    """Counts what is refused; more sequences than could ever run are the client's fault, whatever the limit."""
    try:
        yield
    except RequestError as error:
        desk.metrics.rejected[reason if error.status == 429 else "too_many_sequences"] += 1
        raise


def _sent(desk: Desk, choices: Sequence[Choice], params: Sequence[SamplingParams], routing: Routing) -> list[_Run]:
    """All of them, or none: the engine may have gone away since the request came in."""
    runs: list[_Run] = []
    first_of: dict[int, int] = {}  # several answers to one prompt hold the same list: the engine computes it once
    try:
        for choice, sampling in zip(choices, params, strict=True):
            stream = desk.engine.submit(
                choice.prompt_token_ids,
                sampling,
                arrival_time=routing.arrival_time,
                priority=routing.priority,
                tenant=routing.caller.tenant,
                cache_salt=routing.cache_salt,
                parent=first_of.get(id(choice.prompt_token_ids)),
            )
            first_of.setdefault(id(choice.prompt_token_ids), stream.key)
            runs.append(_Run(choice, sampling, stream, RequestTimes(routing.arrival_time)))
    except Exception:
        for run in runs:
            run.stream.cancel()
        raise
    return runs
