"""A whole server on a loopback port with an engine that tests control: real HTTP, real tokenizer, no model."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import httpx
import openai
import pytest
import tokenizers
import uvicorn
from inline_grammars import InlineGrammars
from inline_renderer import InlineRenderer
from starlette.types import ASGIApp
from tokenizers import decoders, models, pre_tokenizers

from quire_common.tls import ReloadingTls
from quire_engine.api.adapters import AdapterService
from quire_engine.api.app import create_app
from quire_engine.api.auth import Access
from quire_engine.api.body import BodyBudget
from quire_engine.api.context import Context
from quire_engine.api.generation import Lifecycle, QueueLimit, ServerServices
from quire_engine.api.http_server import BoundedHttpProtocol
from quire_engine.api.metrics import Exposition, Metrics
from quire_engine.api.pooling import ServedPooling
from quire_engine.api.rendering import Renderer
from quire_engine.api.tracing import Tracing
from quire_engine.config import AccessOptions, AdmissionOptions, CacheOptions, ServerOptions
from quire_engine.core.batch import FinishedSequence, TokenLogprobs
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.cpu.limits import CpuLimits
from quire_engine.ipc.messages import Ready
from quire_engine.ipc.stream import Stream
from quire_engine.text.answers.formats import formats_of
from quire_engine.text.chat_template import ChatTemplate
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'king' %}{{ raise_exception('no kings') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
MAX_MODEL_LEN = 512
EOS = "<|eos|>"


def small_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, so that tests can count."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    return Tokenizer(backend, {"eos_token": EOS})


TOKENIZER = small_tokenizer()
EOS_ID = TOKENIZER.encode(EOS, add_special_tokens=False)[0]


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class FakeStream(Stream):
    """One sequence, whose tokens the test chooses. A reader gets one report at a time."""

    def __init__(self, key: int, prompt: list[int], params: SamplingParams, routing: dict[str, Any]) -> None:
        super().__init__(key, give_up=lambda key: None)
        self.prompt = prompt
        self.params = params
        self.routing = routing
        self.cancelled = asyncio.Event()
        self.unreported: asyncio.Queue[Callable[[], None]] = asyncio.Queue()

    async def wait(self) -> None:
        while self._token_ids:
            await asyncio.sleep(0)
        (await self.unreported.get())()
        await super().wait()

    def cancel(self) -> None:
        self.cancelled.set()
        self.unreported.put_nowait(partial(self.finish, FinishedSequence(self.key, "abort", None)))

    def starts(self, *, cached: int = 0) -> None:
        self.unreported.put_nowait(partial(self.first_scheduled, time.monotonic(), cached))

    def report_prompt(self) -> None:
        """Report prompt logprobs if they were requested: rank 3 for each token."""
        wanted = self.params.prompt_logprobs
        if wanted is not None:
            entries = [
                TokenLogprobs([i, *range(wanted)], [-0.5, *(-1.0 - k for k in range(wanted))], 3)
                for i in self.prompt[1:]
            ]
            self.unreported.put_nowait(partial(self.take_prompt_logprobs, entries))

    def draw(
        self,
        ids: Sequence[int],
        finish: str | None = None,
        *,
        stop_id: int | None = None,
        cached: int = 0,
        logprob: float = -0.25,
    ) -> None:
        wanted = self.params.logprobs
        now = time.monotonic()

        def report() -> None:
            if self.first_scheduled_time is None:
                self.first_scheduled(now, cached)
            for i in ids:
                others = None if wanted is None else [-1.0 - k for k in range(wanted)]
                self.take(i, None if others is None else TokenLogprobs([i, *range(len(others))], [logprob, *others], 1))
            if finish is not None:
                self.finish(FinishedSequence(self.key, finish, stop_id))  # type: ignore[arg-type]

        self.unreported.put_nowait(report)

    def breaks(self, error: Exception) -> None:
        self.unreported.put_nowait(partial(self.fail, error))  # type: ignore[arg-type]


@dataclass
class FakeEngine:
    """An engine that answers every request with ``says``, a token per update; without it the test chooses tokens."""

    says: str | Callable[[str], str] | None = None
    """The answer, or a function of the prompt."""
    forced: Callable[[str], str] | None = None
    """The answer to a request with this grammar; without it, ``says`` answers such requests too."""
    ready: Ready | None = None
    state: str = "ready"
    failure: str | None = None
    cpu: CpuLimits | None = None
    streams: list[FakeStream] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    resets: int = 0
    refuses: Exception | None = None
    """The exception that ``submit`` raises."""

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams, **routing: Any) -> FakeStream:
        if self.refuses is not None:
            raise self.refuses
        stream = FakeStream(len(self.streams) + 1, list(prompt_token_ids), params, routing)
        self.streams.append(stream)
        self.submitted.set()
        if self.says is not None:
            stream.report_prompt()
            text = self.says if isinstance(self.says, str) else self.says(TOKENIZER.decode(prompt_token_ids))
            if params.grammar is not None and self.forced is not None:
                text = self.forced(params.grammar)
            ids = ids_of(text)
            for token_id in ids[: params.max_tokens - 1]:
                stream.draw([token_id], cached=3)
            if len(ids) < params.max_tokens:
                stream.draw([EOS_ID], "stop", stop_id=EOS_ID, cached=3)
            else:
                stream.draw([ids[params.max_tokens - 1]], "length", cached=3)
        return stream

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    async def stream(self, number: int = 0) -> FakeStream:
        while len(self.streams) <= number:
            self.submitted.clear()
            await self.submitted.wait()
        return self.streams[number]


@dataclass
class Running:
    engine: FakeEngine
    context: Context
    address: str
    app: ASGIApp
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    @property
    def queue(self) -> QueueLimit:
        return self.context.services.queue

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "demo", "prompt": "Hi", **fields})


def some_ready(max_model_len: int = MAX_MODEL_LEN) -> Ready:
    return Ready(
        pid=1,
        model_bytes=1,
        kv_cache_bytes=1,
        num_blocks=64,
        block_size=16,
        max_model_len=max_model_len,
        dtype="float32",
        weights="float32",
        phase_seconds={"import": 0.5, "weights": 0.1},
        eos_token_ids=(EOS_ID,),
    )


@asynccontextmanager
async def running(
    engine: FakeEngine,
    *,
    template: str | None = TEMPLATE,
    defaults: SamplingDefaults | None = None,
    admission: AdmissionOptions | None = None,
    access: AccessOptions | None = None,
    priorities: bool = False,
    log_requests: bool = False,
    tls: ReloadingTls | None = None,
    tracing: Tracing | None = None,
    renderer: Renderer | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    adapters: AdapterService | None = None,
    pooling: ServedPooling | None = None,
    max_model_len: int = MAX_MODEL_LEN,
    **options: Any,
) -> AsyncIterator[Running]:
    metrics = Metrics("demo", max_model_len)
    admission = admission or AdmissionOptions()
    services = ServerServices(
        engine=engine,
        metrics=metrics,
        queue=QueueLimit(max_requests=admission.max_queued_requests, max_tokens=admission.max_queued_tokens or 10**6),
        lifecycle=Lifecycle(),
        now=time.monotonic,
        max_queue_seconds=admission.max_queue_seconds,
    )
    context = Context(
        options=replace(ServerOptions(), **options),
        model_names=("demo", "alias"),
        created=1_700_000_000,
        tokenizer=TOKENIZER,
        grammars=InlineGrammars(TOKENIZER, (EOS_ID,)),
        renderer=renderer or (None if template is None else InlineRenderer(ChatTemplate(template, {"eos_token": EOS}))),
        sampling_defaults=defaults or SamplingDefaults(),
        formats=formats_of(template, tool_call_parser, reasoning_parser),
        vocab_size=TOKENIZER.vocab_size,
        priorities=priorities,
        services=services,
        metrics=metrics,
        bodies=BodyBudget(replace(ServerOptions(), **options).body_memory_bytes),
        adapters=adapters,
        pooling=pooling,
    )
    expiry = None if tls is None else tls.certificate_expiry
    exposition = Exposition(metrics, CacheOptions(), time.monotonic, expiry, adapters=adapters)
    guard = Access(
        access or AccessOptions(), time.monotonic, certificates=tls is not None and tls.asks_for_certificates
    )
    app = create_app(context, exposition, guard, log_requests=log_requests, tracing=tracing)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = QuietServer(
            uvicorn.Config(app, http=BoundedHttpProtocol, log_config=None, lifespan="off", timeout_graceful_shutdown=2)
        )
        server.config.load()
        server.config.ssl = None if tls is None else tls.listener_context
        task = asyncio.create_task(server.serve([listener]))
        address = f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
        while not server.started:
            await asyncio.sleep(0.005)
        async with (
            httpx.AsyncClient(base_url=address, timeout=20) as http,
            openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any-key-1", max_retries=0, timeout=20) as client,
        ):
            yield Running(engine, context, address, app, http, client)
        server.should_exit = True
        await task


class QuietServer(uvicorn.Server):
    """A uvicorn server without its signal handlers, because pytest has its own."""

    def capture_signals(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def serving() -> Callable[..., Any]:
    """Return a factory of servers.

    ``async with serving(says="Hello") as server``
    """

    def start(
        says: str | Callable[[str], str] | None = None,
        *,
        ready: bool = True,
        forced: Callable[[str], str] | None = None,
        max_model_len: int = MAX_MODEL_LEN,
        **options: Any,
    ) -> Any:
        report = some_ready(max_model_len) if ready else None
        return running(FakeEngine(says=says, ready=report, forced=forced), max_model_len=max_model_len, **options)

    return start


@pytest.fixture
def token_ids() -> Callable[[str], list[int]]:
    return ids_of
