"""Continuous traffic during a scenario, in an event loop in its own thread, so that scenarios stay synchronous.

    with Traffic(url, model="chat", concurrency=4) as traffic:
        traffic.wait_for_answers(10, "before")
        traffic.mark("kill -9 engine")
        traffic.permit(Permit(why="it ran there", kinds=CUT, replica=victim, after="kill -9 engine", within_seconds=5))
        …

Leaving the block stops the traffic, waits for running requests, and asserts that every answer was correct;
`traffic.result` contains the figures. If the block raised an error, that error is reported. If the block stopped the
traffic itself, it has the result and checks it itself.
"""

import asyncio
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self
from uuid import uuid4

import aiohttp

from e2e_support.traffic.answer import Form
from e2e_support.traffic.client import Address, Ask, Exchange, Patience, send
from e2e_support.traffic.prompts import Prompt, load
from e2e_support.traffic.result import Mark, Permit, Record, TrafficResult

MAX_IN_FLIGHT = 256
_LOOK_SECONDS = 0.02
_AFTER_FAILURE_SECONDS = 0.2
"""The delay before another request replaces a failed one, so that a rejecting server is not flooded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """The current state while traffic flows."""

    seconds: float
    in_flight: int
    streams: Mapping[str, int]
    """Running streams that have started to answer, by replica."""
    completed: int
    failed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """A number of running requests, of which a slow server gets fewer, or of starts per second, as with users."""

    requests: int = 0
    per_second: float = 0.0


class Traffic:
    """Traffic with an initial `concurrency` (number of running requests) or `rate` (requests started per second)."""

    def __init__(
        self,
        url: str,
        *,
        model: str,
        prompts: Sequence[Prompt] | None = None,
        forms: Sequence[Form] = tuple(Form),
        concurrency: int | None = None,
        rate: float | None = None,
        salted_share: float = 0.3,
        beyond: int = 0,
        api_key: str | None = None,
        patience: Patience | None = None,
        at_least: int = 1,
        beside: "Traffic | None" = None,
    ) -> None:
        """Configure the traffic.

        A share of `salted_share` of the requests finds nothing in the prefix cache. `at_least` requests must complete.
        `beyond` requests additional tokens after the known ones (for prompts without an end of their own): long streams
        whose beginning is compared token by token and whose length is exact. Times are seconds since the start of this
        traffic, or of the traffic it flows `beside`.
        """
        if (concurrency is None) == (rate is None):
            raise ValueError("give either concurrency or rate")
        run_id = f"e2e-{uuid4().hex[:8]}"
        self._address = Address(url=url.rstrip("/"), model=model, api_key=api_key, run_id=run_id)
        self._asks = _asks(prompts or load(), forms, salted_share=salted_share, beyond=beyond)
        self._patience = patience or Patience()
        self._at_least = at_least
        self._first_pace = _Pace(requests=concurrency or 0, per_second=rate or 0.0)
        self._beside = beside
        self._began: float = time.monotonic() if beside is None else beside._began
        self._lock = threading.Lock()
        # Under the lock: read by the scenario's thread, written by the driver's.
        self._records: list[Record] = []
        self._marks: list[Mark] = []
        self._in_flight: dict[int, Exchange] = {}
        self._permits: list[Permit] = []
        self._held_back = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._conductor: _Conductor | None = None
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._started = threading.Event()
        self._broken: BaseException | None = None
        self._result: TrafficResult | None = None

    def __enter__(self) -> Self:
        if self._beside is None:
            self._began = time.monotonic()
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        stopped_before = self._result is not None
        result = self.stop()
        if error is None and not stopped_before:
            result.assert_all_right(*self._permits, at_least=self._at_least)
        elif error is not None and result.failures:
            error.add_note(f"traffic: {len(result.failures)} of {len(result.records)} requests had failed")

    def mark(self, name: str) -> float:
        """Name this moment and return its time."""
        mark = Mark(seconds=self.now(), name=name)
        with self._lock:
            self._marks.append(mark)
        return mark.seconds

    def permit(self, permit: Permit) -> None:
        self._permits.append(permit)

    def set_concurrency(self, requests: int) -> None:
        self._set_pace(_Pace(requests=requests))

    def set_rate(self, per_second: float) -> None:
        """Start this number of requests per second, whatever their results."""
        self._set_pace(_Pace(per_second=per_second))

    def pause(self) -> None:
        """Start no more requests; running ones continue."""
        self._set_pace(_Pace(requests=0))

    def now(self) -> float:
        """Return the seconds since the start of the traffic."""
        return time.monotonic() - self._began

    def live(self) -> Live:
        with self._lock:
            under_way = tuple(self._in_flight.values())
            streams = Counter(one.replica for one in under_way if one.replica and one.chunk_times)
            failed = sum(not record.ok for record in self._records)
            return Live(
                seconds=self.now(),
                in_flight=len(under_way),
                streams=dict(streams),
                completed=len(self._records) - failed,
                failed=failed,
            )

    def wait_for(self, condition: Callable[[Live], bool], seconds: float, what: str) -> Live:
        """Wait for a state. Raise TimeoutError with `what` and the current state."""
        until = time.monotonic() + seconds
        while not condition(live := self.live()):
            if self._broken is not None:
                raise RuntimeError("the traffic driver itself failed") from self._broken
            if time.monotonic() > until:
                raise TimeoutError(f"not within {seconds:g} s: {what}; now {live}")
            time.sleep(_LOOK_SECONDS)
        return live

    def wait_for_answers(self, count: int, what: str, *, seconds: float = 60) -> None:
        """Wait for this number of further correct answers."""
        before = self.live().completed
        self.wait_for(lambda live: live.completed >= before + count, seconds, f"{count} answers {what}")

    def stop(self) -> TrafficResult:
        """Start no more requests, wait for running ones and return the result. It may be called twice."""
        if self._result is None:
            self._call(lambda conductor: conductor.stop())
            self._thread.join()
            if self._broken is not None:
                raise RuntimeError("the traffic driver itself failed") from self._broken
            self._result = self.so_far()
        return self._result

    @property
    def result(self) -> TrafficResult:
        assert self._result is not None, "the traffic still flows"
        return self._result

    def so_far(self) -> TrafficResult:
        """Return the result of the requests that are finished."""
        with self._lock:
            return TrafficResult(
                records=tuple(sorted(self._records, key=lambda record: record.number)),
                marks=tuple(self._marks),
                seconds=self.now(),
                held_back=self._held_back,
            )

    def _run(self) -> None:
        try:
            asyncio.run(self._drive())
        except BaseException as error:
            self._broken = error
        finally:
            self._started.set()

    async def _drive(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._conductor = _Conductor(self._first_pace, self._request, self.now)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            self._started.set()
            await self._conductor.run()
            self._held_back = self._conductor.held_back

    async def _request(self) -> None:
        exchange = Exchange(next(self._asks), self._began)
        number = exchange.ask.number
        with self._lock:
            self._in_flight[number] = exchange
        record = await send(self._session, self._address, exchange, self._patience)
        with self._lock:
            del self._in_flight[number]
            self._records.append(record)
        if not record.ok:
            await asyncio.sleep(_AFTER_FAILURE_SECONDS)

    def _set_pace(self, pace: _Pace) -> None:
        self._call(lambda conductor: conductor.set_pace(pace))

    def _call(self, what: Callable[["_Conductor"], None]) -> None:
        loop, conductor = self._loop, self._conductor
        if loop is not None and conductor is not None and not loop.is_closed():
            loop.call_soon_threadsafe(what, conductor)


class _Conductor:
    """A scheduler that starts requests when they are due, in the driver's event loop."""

    def __init__(
        self, pace: _Pace, request: Callable[[], Coroutine[object, object, None]], now: Callable[[], float]
    ) -> None:
        self.pace = pace
        self.held_back = 0
        self._request, self._now = request, now
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._stopping = False
        self._due = now()

    def set_pace(self, pace: _Pace) -> None:
        self.pace = pace
        self._due = self._now()
        self._changed.set()

    def stop(self) -> None:
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Run until stopped and no request is running."""
        while not self._stopping:
            self._changed.clear()
            wait = self._begin_what_is_due()
            try:
                await asyncio.wait_for(self._changed.wait(), wait)
            except TimeoutError:
                continue
        # Each ends by itself: its client has little patience with silence.
        await asyncio.gather(*self._running)

    def _begin_what_is_due(self) -> float | None:
        """Start due requests. Return the seconds until the next one, or None until a change."""
        while len(self._running) < self.pace.requests:
            self._begin()
        if self.pace.per_second <= 0:
            return None
        now = self._now()
        while self._due <= now:
            if len(self._running) < MAX_IN_FLIGHT:
                self._begin()
            else:
                self.held_back += 1
            self._due += 1 / self.pace.per_second
        return max(0.0, self._due - now)

    def _begin(self) -> None:
        task = asyncio.create_task(self._request())
        self._running.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self._changed.set()


def _asks(prompts: Sequence[Prompt], forms: Sequence[Form], *, salted_share: float, beyond: int) -> Iterator[Ask]:
    """Yield requests endlessly; each round contains every prompt in every form once, always in the same order."""
    rng = random.Random(0)
    number = itertools.count()
    while True:
        pairs = list(itertools.product(prompts, forms))
        rng.shuffle(pairs)
        for prompt, form in pairs:
            yield Ask(number=next(number), prompt=prompt, form=form, salted=rng.random() < salted_share, beyond=beyond)
