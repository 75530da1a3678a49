"""The life of one server: it starts the engine process, serves, drains and ends."""

import asyncio
import gc
import logging
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import TYPE_CHECKING

import uvicorn
import uvloop
from starlette.types import ASGIApp

from quire_common.names import url_host
from quire_common.tls import ReloadingTls
from quire_engine import logs
from quire_engine.api.adapters import AdapterService, fetch_files
from quire_engine.api.app import create_app
from quire_engine.api.auth import Access
from quire_engine.api.body import BodyBudget
from quire_engine.api.context import Context
from quire_engine.api.generation import Lifecycle, QueueLimit, ServerServices
from quire_engine.api.grammars import GrammarPool
from quire_engine.api.http_server import BoundedHttpProtocol
from quire_engine.api.metrics import Exposition, Metrics
from quire_engine.api.pooling import served_pooling
from quire_engine.api.rendering import RenderLimits, RenderPool
from quire_engine.config import EngineConfig
from quire_engine.cpu.choice import CpuChoice, log_choice
from quire_engine.errors import AdapterError, EngineStartError, TracingError, Unavailable
from quire_engine.ipc.client import EngineClient
from quire_engine.ipc.messages import Ready, RunnerFactory
from quire_engine.ipc.process import Spawned
from quire_engine.model_folder import ModelFolder
from quire_engine.text.model_text import ModelText, end_problem

if TYPE_CHECKING:
    from quire_engine.api.otlp import OtlpTracing

_log = logging.getLogger(__name__)


class UvicornServer(uvicorn.Server):
    """A uvicorn server without signal handlers: a signal begins a drain, during which the server must still answer."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


_KEEP_ALIVE_SECONDS = 75
"""Longer than the gateway keeps an idle connection, so that the gateway never writes to one that is being closed."""
_SHUTDOWN_SECONDS = 5
"""The time after the drain in which error events are sent and connections close."""
_QUEUED_CACHE_SIZES = 8
"""The default bound of the queue in prompt tokens, in multiples of the KV cache's size."""
INTERRUPTED = 130
"""The exit status after a second Ctrl-C."""


def serve(
    config: EngineConfig,
    folder: ModelFolder,
    text: ModelText,
    listener: socket.socket,
    *,
    factory: RunnerFactory | None = None,
    spawned: Spawned | None = None,
    cpu: CpuChoice | None = None,
    began: float | None = None,
) -> int:
    """Serve until a signal arrives, and return the exit status. The socket must listen already.

    ``factory`` replaces the model in tests and benchmarks; no flag sets it. ``spawned`` is the engine process if it is
    already loading, ``cpu`` the CPU instructions that engine processes may use, and ``began`` the monotonic time at
    which this process began.
    """
    began = time.monotonic() if began is None else began
    logs.set_up(config.log)
    log_choice(cpu)
    try:
        with listener:
            server = _Server(config, folder, text, listener, factory=factory, spawned=spawned, cpu=cpu, began=began)
            # What is loaded stays. To look through it, the collector would stop all streams for 50 ms, and each body
            # of many messages would make it do so.
            gc.collect()
            gc.freeze()
            return uvloop.run(server.run())
    finally:
        if config.server.uds is not None:
            config.server.uds.unlink(missing_ok=True)


def _tracing(endpoint: str) -> "OtlpTracing":
    """Return the sender of spans. OpenTelemetry is imported only here, so that it costs nothing without tracing."""
    try:
        from quire_engine.api.otlp import OtlpTracing
    except ImportError as error:
        raise TracingError(
            "--otlp-traces-endpoint needs the packages opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http; "
            f"{error.name} is missing"
        ) from error
    return OtlpTracing(endpoint)


class _Server:
    def __init__(
        self,
        config: EngineConfig,
        folder: ModelFolder,
        text: ModelText,
        listener: socket.socket,
        *,
        factory: RunnerFactory | None,
        spawned: Spawned | None,
        cpu: CpuChoice | None,
        began: float,
    ) -> None:
        self._config, self._text, self._listener, self._began = config, text, listener, began
        options = config.server
        self._tls = None if options.tls is None else ReloadingTls(options.tls, time.monotonic)
        access = Access(
            options.access,
            time.monotonic,
            certificates=self._tls is not None and self._tls.asks_for_certificates,
            local=options.uds is not None,
        )
        self._tracing = None if options.otlp_traces_endpoint is None else _tracing(options.otlp_traces_endpoint)
        self._stop, self._interrupted = asyncio.Event(), asyncio.Event()
        names = options.served_model_names or (folder.name,)
        limit = config.model.max_model_len or folder.max_position_embeddings or 2**17
        self._metrics = Metrics(names[0], limit)
        self._engine = EngineClient(config, factory=factory, observer=self._metrics, spawned=spawned, cpu=cpu)
        self._lifecycle = Lifecycle()
        self._queue = QueueLimit(
            max_requests=options.admission.max_queued_requests, max_tokens=options.admission.max_queued_tokens or limit
        )
        self._renderer = None if text.chat_template is None else RenderPool(text.chat_template, _render_limits(config))
        self._grammars = GrammarPool()
        self._adapters = self._make_adapters(config, names) if config.adapters.enabled else None
        self._context = self._make_context(names, folder.vocab_size or text.tokenizer.vocab_size)
        self._http = _http_server(self._make_app(access), self._tls)

    def _make_context(self, names: tuple[str, ...], vocab_size: int) -> Context:
        config, text = self._config, self._text
        services = ServerServices(
            engine=self._engine,
            metrics=self._metrics,
            queue=self._queue,
            lifecycle=self._lifecycle,
            now=time.monotonic,
            max_queue_seconds=config.server.admission.max_queue_seconds,
        )
        return Context(
            options=config.server,
            model_names=names,
            created=int(time.time()),
            tokenizer=text.tokenizer,
            renderer=self._renderer,
            grammars=self._grammars,
            sampling_defaults=text.sampling_defaults,
            formats=text.formats,
            vocab_size=vocab_size,
            priorities=config.scheduler.policy == "priority",
            services=services,
            metrics=self._metrics,
            bodies=BodyBudget(config.server.body_memory_bytes),
            adapters=self._adapters,
            pooling=None if config.pooling is None else served_pooling(config.pooling, text, vocab_size),
        )

    def _make_app(self, access: Access) -> ASGIApp:
        config = self._config
        expiry = None if self._tls is None else self._tls.certificate_expiry
        most_drafts = 0 if config.speculation is None else config.speculation.max_tokens
        exposition = Exposition(
            self._metrics,
            config.cache,
            time.monotonic,
            expiry,
            most_drafts,
            self._adapters,
            prefix_caching=config.scheduler.enable_prefix_caching,
        )
        return create_app(self._context, exposition, access, log_requests=config.log.requests, tracing=self._tracing)

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        _log.info("listening on %s; the engine is starting", self._address())
        http = asyncio.create_task(self._http.serve([self._listener]), name="http")
        starting = asyncio.create_task(self._start_engine(), name="engine start")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait({http, starting, stop}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()  # raises EngineStartError where there will be no engine
                await asyncio.wait({http, stop}, return_when=asyncio.FIRST_COMPLETED)
            return await self._drain()
        finally:
            self._http.should_exit = True
            self._http.force_exit = self._interrupted.is_set()
            for task in (starting, stop):
                task.cancel()
            await asyncio.wait({http}, timeout=2 * _SHUTDOWN_SECONDS)
            if self._adapters is not None:
                await self._adapters.close()
            await self._engine.close()
            if self._renderer is not None:
                await self._renderer.close()
            await self._grammars.close()
            if self._tracing is not None:
                await _within(self._tracing.close, _SHUTDOWN_SECONDS)

    def _address(self) -> str:
        if self._config.server.uds is not None:
            return f"unix:{self._config.server.uds}"
        host, port = self._listener.getsockname()[:2]
        return f"{'http' if self._tls is None else 'https'}://{url_host(host)}:{port}"

    async def _start_engine(self) -> None:
        if self._adapters is not None:
            # Before the engine is ready, so that no request for an adapter is answered as if there was no such model.
            await self._adapters.start()
        ready = await self._engine.start()
        if self._config.server.admission.max_queued_tokens is None:
            self._queue.max_tokens = _QUEUED_CACHE_SIZES * ready.num_blocks * ready.block_size
        _log.info("%s", _summary(ready))
        generates = self._context.pooling is None
        if generates and (problem := end_problem(self._text, ready.eos_token_ids)):
            _log.warning("%s", problem)
        _log.info("ready: %s", _phases(self._metrics.model_name, ready, time.monotonic() - self._began))
        if self._renderer is not None:
            await self._renderer.start()
        if generates:
            await self._enable_grammars(ready)
        if self._adapters is not None:
            await self._require_adapters_of_flags(self._adapters)

    def _make_adapters(self, config: EngineConfig, names: tuple[str, ...]) -> AdapterService:
        figures = self._metrics.engine
        adapters = AdapterService(
            config.adapters,
            self._engine,
            lambda entry: fetch_files(entry, config.model.download_dir),
            base_names=names,
            gauges=lambda: None if figures.latest is None else figures.latest.gauges,
            loads_total=lambda: 0 if figures.latest is None else figures.latest.counters.adapter_loads,
        )
        self._engine.adapter_observer = adapters
        return adapters

    async def _require_adapters_of_flags(self, adapters: AdapterService) -> None:
        try:
            await adapters.flags_served()
        except AdapterError as error:
            _log.error("%s", error)
            raise EngineStartError(str(error), exit_code=2) from error

    async def _enable_grammars(self, ready: Ready) -> None:
        """Give the tokens of the model to the engine and to the workers that compile grammars."""
        vocabulary = await asyncio.to_thread(
            self._text.tokenizer.vocabulary, self._context.vocab_size, ready.eos_token_ids
        )
        if vocabulary is not None:
            self._engine.set_vocabulary(vocabulary)
        self._grammars.set_vocabulary(vocabulary)

    def _on_signal(self, number: signal.Signals) -> None:
        if number == signal.SIGINT and self._stop.is_set():
            self._interrupted.set()
            return
        if not self._stop.is_set():
            _log.info("draining after %s: %d requests in flight", number.name, self._lifecycle.in_flight)
        self._lifecycle.begin_drain()
        self._stop.set()

    async def _drain(self) -> int:
        """Let running requests finish within the drain timeout, fail the others, and return the exit status."""
        self._lifecycle.begin_drain()
        drained = asyncio.create_task(self._lifecycle.drained())
        interrupted = asyncio.create_task(self._interrupted.wait())
        timeout = self._config.server.drain_timeout_seconds
        await asyncio.wait({drained, interrupted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        if not drained.done():
            why = "interrupted" if interrupted.done() else f"the drain timeout of {timeout:g} s is over"
            _log.warning("drain ended: %s; aborting %d requests", why, self._lifecycle.in_flight)
            self._lifecycle.fail_all(Unavailable(f"the server is stopping: {why}", code="shutting_down"))
            await asyncio.wait({drained}, timeout=1.0 if interrupted.done() else _SHUTDOWN_SECONDS)
        status = INTERRUPTED if interrupted.done() else 0
        for task in (drained, interrupted):
            task.cancel()
        return status


def _http_server(app: ASGIApp, tls: ReloadingTls | None) -> UvicornServer:
    server = UvicornServer(
        uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # the client is the peer of the connection: see auth.access
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        )
    )
    server.config.load()
    server.config.ssl = None if tls is None else tls.listener_context
    return server


def _render_limits(config: EngineConfig) -> RenderLimits:
    """Return bounds with one worker for short conversations, and few others on a machine with few CPUs."""
    return RenderLimits(workers=1 + min(4, max(1, config.threads // 4)))


async def _within(work: Callable[[], None], seconds: float) -> None:
    """Run ``work`` in a thread for at most ``seconds``; a thread that takes longer does not keep the process alive."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def run() -> None:
        work()
        with suppress(RuntimeError):  # the loop is closed, so nothing waits any more
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=run, name="shutdown", daemon=True).start()
    with suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), seconds)


def _summary(ready: Ready) -> str:
    return (
        f"model loaded: computes in {ready.dtype}; weights {ready.weights}, {ready.model_bytes / 2**20:.1f} MiB; "
        f"KV cache {ready.num_blocks} blocks of {ready.block_size} tokens, {ready.kv_cache_bytes / 2**20:.1f} MiB; "
        f"at most {ready.max_model_len} tokens per request"
    )


def _phases(name: str, ready: Ready, total: float) -> str:
    """Return the duration of the start and of its phases; phases under 0.05 s are omitted."""
    shown = {phase: f"{seconds:.1f}" for phase, seconds in ready.phase_seconds.items()}
    parts = ", ".join(f"{phase} {seconds}" for phase, seconds in shown.items() if seconds != "0.0")
    return f"{name} in {total:.1f} s" + (f" ({parts})" if parts else "")
