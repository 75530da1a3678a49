"""The counted work of the API process: from the engine's message with a token to the bytes of its event.

The application is called directly, because the cost of the HTTP server around it is not ours. Streams of two lengths
are counted, so that their difference is the cost of tokens without the request itself.
"""

import asyncio
import json
from collections.abc import Sequence
from itertools import count
from time import monotonic
from typing import Any

from inline_grammars import InlineGrammars
from inline_renderer import InlineRenderer

from benchmarks.report import DEMO_MODEL
from quire_engine.api.app import create_app
from quire_engine.api.auth import Access
from quire_engine.api.body import BodyBudget
from quire_engine.api.context import Context
from quire_engine.api.generation import Lifecycle, QueueLimit, ServerServices
from quire_engine.api.metrics import Exposition, Metrics
from quire_engine.config import AccessOptions, CacheOptions, ServerOptions
from quire_engine.core.batch import FinishedSequence
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.ipc.messages import Ready
from quire_engine.ipc.stream import Stream
from quire_engine.text.answers.formats import AnswerFormats
from quire_engine.text.chat_template import ChatTemplate
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import load_tokenizer
from quire_guard.counting import python_cost

_MAX_MODEL_LEN = 1024
_SHORT, _LONG = 32, 96
_TOKEN = 300
"""A word of the demo model."""


class _Engine:
    """An engine that returns real streams, which the caller feeds."""

    def __init__(self) -> None:
        self.state = "ready"
        self.failure = None
        self.streams: list[Stream] = []
        self._keys = count(1)
        self.ready: Ready | None = Ready(
            pid=1,
            model_bytes=1,
            kv_cache_bytes=1,
            num_blocks=64,
            block_size=16,
            max_model_len=_MAX_MODEL_LEN,
            dtype="float32",
            weights="float32",
            phase_seconds={},
            eos_token_ids=(1,),
        )

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams, **routing: Any) -> Stream:
        stream = Stream(next(self._keys), give_up=lambda key: None)
        self.streams.append(stream)
        return stream

    def reset_prefix_cache(self) -> None:
        """Do nothing: there is no cache."""


def served_counts() -> dict[str, float]:
    found = {}
    for route, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
    ):
        instructions = {}
        for tokens in (_SHORT, _LONG):
            _streamed(route, body, tokens)  # fills caches of the first use
            instructions[tokens] = _instructions(route, body, tokens)
        name = route.removeprefix("/v1/").replace("/", " ")
        found[f"API process: instructions per token, {name}"] = (instructions[_LONG] - instructions[_SHORT]) / (
            _LONG - _SHORT
        )
    return found


def _instructions(route: str, body: dict[str, Any], tokens: int) -> int:
    return python_cost(lambda: _streamed(route, body, tokens)).instructions


def _streamed(route: str, body: dict[str, Any], tokens: int) -> None:
    events = asyncio.run(_stream(route, body, tokens))
    assert events >= tokens, f"{events} events for {tokens} tokens"


async def _stream(route: str, body: dict[str, Any], tokens: int) -> int:
    """Stream tokens as separate events and return the number of events."""
    engine = _Engine()
    sent: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b""))

    request = json.dumps({"model": "demo", "stream": True, "max_tokens": tokens, "ignore_eos": True, **body}).encode()
    asked: list[dict[str, Any]] = [{"type": "http.request", "body": request, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if asked:
            return asked.pop()
        await asyncio.Event().wait()
        raise AssertionError("nothing more comes")

    app = _app(engine)
    answering = asyncio.ensure_future(app(_scope(route), receive, send))
    while not engine.streams and not answering.done():
        await asyncio.sleep(0)
    assert engine.streams, b"".join(sent)
    (stream,) = engine.streams
    for number in range(tokens):
        already = len(sent)
        stream.take(_TOKEN, None)
        if number == tokens - 1:
            stream.finish(FinishedSequence(stream.key, "length", None))
        while len(sent) == already:
            await asyncio.sleep(0)
    await answering
    return b"".join(sent).count(b"data: {")


def _scope(route: str) -> dict[str, Any]:
    return {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": route,
        "raw_path": route.encode(),
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
    }


def _app(engine: _Engine) -> Any:
    metrics = Metrics("demo", _MAX_MODEL_LEN)
    services = ServerServices(
        engine=engine,
        metrics=metrics,
        queue=QueueLimit(max_requests=8, max_tokens=10**6),
        lifecycle=Lifecycle(),
        now=monotonic,
    )
    tokenizer = load_tokenizer(DEMO_MODEL)
    context = Context(
        options=ServerOptions(),
        model_names=("demo",),
        created=1,
        tokenizer=tokenizer,
        renderer=InlineRenderer(ChatTemplate("{{ messages[0].content }}", {})),
        grammars=InlineGrammars(tokenizer, (1,)),
        sampling_defaults=SamplingDefaults(),
        formats=AnswerFormats(),
        vocab_size=tokenizer.vocab_size,
        priorities=False,
        services=services,
        metrics=metrics,
        bodies=BodyBudget(ServerOptions().body_memory_bytes),
    )
    exposition = Exposition(metrics, CacheOptions(), monotonic, None)
    access = Access(AccessOptions(), monotonic, certificates=False)
    return create_app(context, exposition, access, log_requests=False)
