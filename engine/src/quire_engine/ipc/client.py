"""The engine client of the API process: it sends requests, returns their tokens, and survives the loss of a process.

It imports neither torch nor the engine, and is used from one event loop.
"""

from collections.abc import Sequence
from itertools import count
from secrets import randbits
from typing import Protocol

from quire_common.contract.adapters_file import AdapterFailure
from quire_common.contract.engine import ENGINE_STOPPED
from quire_engine.config import EngineConfig
from quire_engine.core.batch import StepOutput
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.cpu.choice import CpuChoice
from quire_engine.cpu.limits import CpuLimits
from quire_engine.errors import InvalidRequest, Unavailable
from quire_engine.grammar.spec import Vocabulary
from quire_engine.ipc.messages import (
    AdapterFailed,
    AdapterLoaded,
    Cancel,
    FromEngine,
    LoadAdapter,
    Ready,
    Refused,
    ResetPrefixCache,
    RunnerFactory,
    SetVocabulary,
    Stats,
    Submit,
    UnloadAdapter,
)
from quire_engine.ipc.process import Spawned
from quire_engine.ipc.stream import Stream
from quire_engine.ipc.supervision import State, Supervisor

_LOST_RETRY_SECONDS = 5
_STATE_RETRY_SECONDS = 2
_UNAVAILABLE = {
    "starting": "the engine is starting; try again shortly",
    "restarting": "the engine is being restarted; try again shortly",
    "failed": "the engine has failed",
    "stopped": "the server is stopping",
}


def unavailable(state: str) -> Unavailable:
    """Return the error for requests while the engine is in a state other than ready."""
    return Unavailable(_UNAVAILABLE[state], code=f"engine_{state}", retry_after_seconds=_STATE_RETRY_SECONDS)


class Observer(Protocol):
    """A listener for all reports of the engine, e.g. metrics."""

    def engine_ready(self, ready: Ready) -> None: ...

    def engine_sent(self, prompt_tokens: int) -> None:
        """Record that the engine got a prompt to compute."""

    def engine_stats(self, stats: Stats) -> None: ...

    def engine_lost(self) -> None:
        """Discard the last report, which is no longer valid."""


class AdapterObserver(Protocol):
    """A listener for the reports about adapters."""

    def adapter_loaded(self, adapter: int, rank: int, num_bytes: int) -> None:
        """Record that an adapter was read and can be served."""

    def adapter_failed(self, adapter: int, reason: AdapterFailure, message: str) -> None:
        """Record that an adapter cannot be served."""


class EngineClient:
    """The client of the engine processes: ``start`` it, ``submit`` sequences, ``close`` it."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: RunnerFactory | None = None,
        observer: Observer | None = None,
        spawned: Spawned | None = None,
        cpu: CpuChoice | None = None,
    ) -> None:
        """Create the client.

        ``spawned`` is the first engine process if it was started before; ``cpu`` limits every process.
        """
        self._supervisor = Supervisor(config, factory or RunnerFactory(), self, spawned, cpu)
        self._observer = observer
        self._streams: dict[int, Stream] = {}
        self._keys = count(1)
        self._vocabulary: Vocabulary | None = None
        self._adapters: dict[int, str] = {}
        """The folders of the adapters that every engine process has, by number."""
        self.adapter_observer: AdapterObserver | None = None
        self.stats: Stats | None = None
        """The last report of the running engine process."""

    async def start(self) -> Ready:
        """Start the engine and return when it is ready. Raise EngineStartError with the engine's reason if it fails."""
        return await self._supervisor.start()

    def set_vocabulary(self, vocabulary: Vocabulary) -> None:
        """Send the tokens of the model to this engine process and to every later one, for requests with a grammar."""
        self._vocabulary = vocabulary
        if self.state == "ready":
            self._supervisor.send(SetVocabulary(vocabulary))

    def load_adapter(self, adapter: int, folder: str) -> None:
        """Let this engine process and every later one have an adapter; ``adapter_observer`` hears the result."""
        self._adapters[adapter] = folder
        if self.state == "ready":
            self._supervisor.send(LoadAdapter(adapter, folder))

    def unload_adapter(self, adapter: int) -> None:
        """Remove an adapter; requests that already use it continue."""
        if self._adapters.pop(adapter, None) is not None and self.state == "ready":
            self._supervisor.send(UnloadAdapter(adapter))

    async def close(self) -> None:
        """End the engine process. Running requests fail with Unavailable: drain before if they should finish."""
        await self._supervisor.close()
        self._fail_all("the server is stopping")

    @property
    def state(self) -> State:
        return self._supervisor.state

    @property
    def ready(self) -> Ready | None:
        """The report of the running engine process; None while it starts or is being replaced."""
        return self._supervisor.ready

    @property
    def cpu(self) -> CpuLimits | None:
        """The CPU instructions that engine processes may use; None if they were not tried."""
        return self._supervisor.cpu

    @property
    def restarts(self) -> int:
        return self._supervisor.restarts

    @property
    def failure(self) -> str | None:
        """The reason why there will be no engine process any more; None while there may be one."""
        return self._supervisor.failure

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        tenant: str | None = None,
        gateway_tenant: str | None = None,
        cache_salt: str | None = None,
        parent: int | None = None,
        adapter: int | None = None,
        output_token_ids: Sequence[int] = (),
    ) -> Stream:
        """Send a request to the engine. Raise Unavailable while there is no engine process.

        ``parent`` is the key of an earlier stream with the same prompt of the same HTTP request. ``output_token_ids``
        were sampled by another engine; the stream has those that follow.
        """
        if self.state != "ready":
            raise unavailable(self.state)
        key = next(self._keys)
        request = Request(
            key=key,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            seed=randbits(63) if params.seed is None else params.seed,
            priority=priority,
            tenant=tenant,
            gateway_tenant=gateway_tenant,
            cache_salt=cache_salt,
            parent=parent,
            adapter=adapter,
            output_token_ids=list(output_token_ids),
        )
        self._supervisor.send(Submit(request))
        if parent is None and self._observer is not None:
            self._observer.engine_sent(len(prompt_token_ids))
        stream = self._streams[key] = Stream(key, give_up=self._cancel)
        return stream

    def reset_prefix_cache(self) -> None:
        """Make all cached prefixes unusable. Raise Unavailable while there is no engine process."""
        if self.state != "ready":
            raise unavailable(self.state)
        self._supervisor.send(ResetPrefixCache())

    def _cancel(self, key: int) -> None:
        if self._streams.pop(key, None) is not None and self.state == "ready":
            self._supervisor.send(Cancel([key]))

    def has_work(self) -> bool:
        return bool(self._streams)

    def receive(self, message: FromEngine) -> None:
        match message:
            case StepOutput():
                self._take(message)
            case Stats():
                self.stats = message
                if self._observer is not None:
                    self._observer.engine_stats(message)
            case Refused(key, text):
                if (stream := self._streams.pop(key, None)) is not None:
                    stream.fail(InvalidRequest(text))
            case AdapterLoaded() | AdapterFailed():
                self._report_adapter(message)
            case Ready():
                for adapter, folder in self._adapters.items():
                    self._supervisor.send(LoadAdapter(adapter, folder))
                if self._vocabulary is not None:
                    self._supervisor.send(SetVocabulary(self._vocabulary))
                if self._observer is not None:
                    self._observer.engine_ready(message)

    def _report_adapter(self, message: AdapterLoaded | AdapterFailed) -> None:
        if self.adapter_observer is None:
            return
        match message:
            case AdapterLoaded(adapter, rank, num_bytes):
                self.adapter_observer.adapter_loaded(adapter, rank, num_bytes)
            case AdapterFailed(adapter, reason, text):
                self.adapter_observer.adapter_failed(adapter, reason, text)

    def _take(self, output: StepOutput) -> None:
        """Give each stream its output. A key without a stream was cancelled while the step ran."""
        streams = self._streams
        for key, cached in zip(output.first_scheduled_keys, output.first_scheduled_cached, strict=True):
            if (stream := streams.get(key)) is not None:
                stream.first_scheduled(output.began, cached)
        for report in output.prompt_logprobs:
            if (stream := streams.get(report.key)) is not None:
                stream.take_prompt_logprobs(report.entries)
        for part in output.pooled:
            if (stream := streams.get(part.key)) is not None:
                stream.take_pooled(part.values)
        logprobs = output.logprobs
        for index, (key, token_id) in enumerate(zip(output.keys, output.token_ids, strict=True)):
            if (stream := streams.get(key)) is not None:
                stream.take(token_id, None if logprobs is None else logprobs[index])
        for finished in output.finished:
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
                    retry_after_seconds=_LOST_RETRY_SECONDS,
                )
            )
