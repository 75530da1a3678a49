"""The engine as the API process sees it: requests go in, their tokens come out, whatever happens to the process behind.

Imports neither torch nor the engine. Used from one event loop.
"""

from collections.abc import AsyncGenerator, Sequence
from itertools import count
from secrets import randbits
from time import monotonic
from typing import Protocol

from quire_common.contract.engine import ENGINE_STOPPED
from quire_engine.config import EngineConfig
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.cpu.choice import CpuChoice
from quire_engine.cpu.limits import CpuLimits
from quire_engine.errors import InvalidRequest, Unavailable
from quire_engine.ipc.messages import (
    Cancel,
    FromEngine,
    Outputs,
    Ready,
    Refused,
    ResetPrefixCache,
    Stats,
    Submit,
)
from quire_engine.ipc.process import Spawned
from quire_engine.ipc.start_up import RunnerFactory
from quire_engine.ipc.stream import Stream, Update
from quire_engine.ipc.supervision import State, SupervisionOptions, Supervisor

_RETRY_AFTER_SECONDS = 5


class Observer(Protocol):
    """Who wants to know of every report, e.g. metrics."""

    def engine_ready(self, ready: Ready) -> None: ...

    def engine_sent(self, prompt_tokens: int) -> None:
        """It was given a prompt to compute."""

    def engine_stats(self, stats: Stats) -> None: ...

    def engine_lost(self) -> None:
        """What it said last holds no more."""


class TokenStream(Protocol):
    """The updates of one sequence that the engine generates."""

    key: int

    async def read(self) -> Update:
        """Wait for updates and return them.

        Raises InvalidRequest where the engine refuses the request, Unavailable where the engine ended.
        """

    def cancel(self) -> None:
        """Stop the sequence; a read under way ends with a finish for the reason ``abort``."""


class EngineService(Protocol):
    """The engine as the server uses it: EngineClient, or a smaller one in tests."""

    @property
    def ready(self) -> Ready | None:
        """The report of the running engine process; None while it starts or is being replaced."""

    @property
    def state(self) -> str:
        """The state that /readyz shows: starting, ready, restarting, failed or stopped."""

    @property
    def failure(self) -> str | None:
        """The reason why there will be no engine process any more; None while there may be one."""

    @property
    def cpu(self) -> CpuLimits | None:
        """The CPU instructions that the engine process may use; None where they were not tried."""

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        parent: int | None = None,
    ) -> TokenStream:
        """Hand a sequence to the engine. Raises Unavailable while there is no engine process.

        ``parent`` is the key of the first stream with the same prompt of the same HTTP request.
        """

    def reset_prefix_cache(self) -> None:
        """Let no prefix computed so far be found any more. Raises Unavailable while there is no engine process."""


class EngineClient:
    """``start`` it, ``submit`` to it, ``close`` it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: RunnerFactory | None = None,
        supervision: SupervisionOptions | None = None,
        observer: Observer | None = None,
        spawned: Spawned | None = None,
        cpu: CpuChoice | None = None,
    ) -> None:
        """``spawned`` is the first engine process, where it was begun before; ``cpu`` limits every one."""
        options = supervision or SupervisionOptions.of(config.engine_process)
        self._supervisor = Supervisor(config, factory or RunnerFactory(), options, self, spawned, cpu)
        self._observer = observer
        self._streams: dict[int, Stream] = {}
        self._keys = count(1)
        self.stats: Stats | None = None
        """The last report of the running engine process."""

    async def start(self) -> Ready:
        """Returns when the engine is ready; raises EngineStartError, in the engine's words, where it will not be."""
        return await self._supervisor.start()

    async def close(self) -> None:
        """End the engine process. What is under way gets Unavailable: drain before, if it should not."""
        await self._supervisor.close()
        self._fail_all("the server is stopping")

    # --- how it stands ---

    @property
    def state(self) -> State:
        return self._supervisor.state

    @property
    def ready(self) -> Ready | None:
        """None while the engine process starts, or is being replaced."""
        return self._supervisor.ready

    @property
    def cpu(self) -> CpuLimits | None:
        """What engine processes may use of the CPU; None where it was not tried."""
        return self._supervisor.cpu

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def failure(self) -> str | None:
        """Why there will be no engine any more; None while there may."""
        return self._supervisor.failure

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    # --- requests ---

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str | None = None,
        cache_salt: str | None = None,
        parent: int | None = None,
    ) -> Stream:
        """Hand a request to the engine. ``parent`` is the key of a stream with the same prompt, submitted before, for
        the same client. Raises Unavailable while there is no engine."""
        if self.state != "ready":
            raise self._unavailable()
        key = next(self._keys)
        request = Request(
            key=key,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=randbits(63) if params.seed is None else params.seed,
            arrival_time=monotonic() if arrival_time is None else arrival_time,
            priority=priority,
            tenant=tenant,
            cache_salt=cache_salt,
            parent=parent,
        )
        self._supervisor.send(Submit(request))
        if parent is None and self._observer is not None:
            self._observer.engine_sent(len(prompt_token_ids))
        stream = self._streams[key] = Stream(key, give_up=self._cancel)
        return stream

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Update, None]:
        """The same as an iterator of updates; closing it cancels the request."""
        stream = self.submit(prompt_token_ids, params, priority=priority, cache_salt=cache_salt)
        try:
            while True:
                update = await stream.read()
                yield update
                if update.finished is not None:
                    return
        finally:
            stream.cancel()

    def reset_prefix_cache(self) -> None:
        """Nothing computed so far is found by its prefix any more. Raises Unavailable while there is no engine."""
        if self.state != "ready":
            raise self._unavailable()
        self._supervisor.send(ResetPrefixCache())

    def _cancel(self, key: int) -> None:
        if self._streams.pop(key, None) is not None and self.state == "ready":
            self._supervisor.send(Cancel([key]))

    def _unavailable(self) -> Unavailable:
        messages: dict[State, str] = {
            "starting": "the engine is starting",
            "restarting": "the engine is being restarted",
            "failed": "the engine has failed",
            "stopped": "the server is stopping",
        }
        return Unavailable(
            messages.get(self.state, "the engine is not ready"),
            code=f"engine_{self.state}",
            retry_after_seconds=_RETRY_AFTER_SECONDS,
        )

    # --- what the supervisor hands on ---

    def has_work(self) -> bool:
        return bool(self._streams)

    def receive(self, message: FromEngine) -> None:
        match message:
            case Outputs():
                self._take(message)
            case Stats():
                self.stats = message
                if self._observer is not None:
                    self._observer.engine_stats(message)
            case Refused(key, text):
                if (stream := self._streams.pop(key, None)) is not None:
                    stream.fail(InvalidRequest(text))
            case Ready():
                if self._observer is not None:
                    self._observer.engine_ready(message)

    def _take(self, outputs: Outputs) -> None:
        """Hand each stream what it got. A key without a stream was cancelled while the step ran."""
        streams = self._streams
        for key, cached in zip(outputs.first_scheduled_keys, outputs.first_scheduled_cached, strict=True):
            if (stream := streams.get(key)) is not None:
                stream.first_scheduled(outputs.first_scheduled_time, cached)
        for report in outputs.prompt_logprobs:
            if (stream := streams.get(report.key)) is not None:
                stream.take_prompt_logprobs(report.entries)
        logprobs = outputs.logprobs
        for index, (key, token_id) in enumerate(zip(outputs.keys, outputs.token_ids, strict=True)):
            if (stream := streams.get(key)) is not None:
                stream.take(token_id, None if logprobs is None else logprobs[index])
        for finished in outputs.finished:
            if (stream := streams.pop(finished.key, None)) is not None:
                stream.finish(finished)

    def engine_down(self, reason: str) -> None:
        self.stats = None
        if self._observer is not None:
            self._observer.engine_lost()
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(
                Unavailable(
                    f"the engine stopped while this request was under way: {reason}",
                    code=ENGINE_STOPPED,
                    retry_after_seconds=_RETRY_AFTER_SECONDS,
                )
            )
