"""The state that the routes of one server share: ``serve`` creates it once, and nothing changes it afterwards."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from quire_engine.api.adapters import AdapterService
from quire_engine.api.body import BodyBudget
from quire_engine.api.generation import Lifecycle, ServerServices
from quire_engine.api.grammars import GrammarCompiler
from quire_engine.api.metrics import Metrics
from quire_engine.api.pooling import ServedPooling
from quire_engine.api.rendering import Renderer
from quire_engine.api.rendering_worker import Conversation
from quire_engine.config import ServerOptions
from quire_engine.errors import InvalidRequest, NotFound
from quire_engine.ipc.client import EngineClient, unavailable
from quire_engine.ipc.messages import Ready
from quire_engine.text.answers.formats import AnswerFormats
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import Tokenizer

_SHOWN_NAMES = 20
_LONG_TEXT_CHARACTERS = 4096
"""A longer text is encoded in a thread, so that the event loop can serve others meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The options, the model's text tools and the services of one server."""

    options: ServerOptions
    model_names: tuple[str, ...]
    created: int
    """The time at which this server started, in Unix seconds: /v1/models reports it as the model's creation."""
    tokenizer: Tokenizer
    renderer: Renderer | None
    """The chat template; None for a model without one."""
    grammars: GrammarCompiler
    sampling_defaults: SamplingDefaults
    formats: AnswerFormats
    vocab_size: int
    priorities: bool
    services: ServerServices
    metrics: Metrics
    bodies: BodyBudget
    adapters: AdapterService | None = None
    """None where the server serves no adapters."""
    pooling: ServedPooling | None = None
    """The pooling of this server; None where it generates text."""

    @property
    def engine(self) -> EngineClient:
        """The engine that generates the answers."""
        return self.services.engine

    @property
    def lifecycle(self) -> Lifecycle:
        """The drain of this server."""
        return self.services.lifecycle

    @property
    def now(self) -> Callable[[], float]:
        """The monotonic clock, in seconds."""
        return self.services.now

    @property
    def end_token_id(self) -> int | None:
        """The model's own end-of-sequence token: the tokenizer's, else the first that its configuration names."""
        ready = self.engine.ready
        ids = () if ready is None else ready.eos_token_ids
        return self.tokenizer.eos_id if self.tokenizer.eos_id in ids else next(iter(ids), None)

    def check_model(self, name: str | None) -> None:
        """Raise NotFound for a name of neither the model nor an adapter; None is the served model."""
        if self.adapters is None or name is None or not self.adapters.knows(name):
            self.check_base(name)

    def check_base(self, name: str | None) -> None:
        """Raise NotFound for a name that is not the model's own; None is the served model."""
        if name is None or name in self.model_names:
            return
        served = [*self.model_names, *(self.adapters.names if self.adapters is not None else ())]
        more = f" and {len(served) - _SHOWN_NAMES} more" if len(served) > _SHOWN_NAMES else ""
        raise NotFound(
            f"model: {name[:100]!r} is not served here; this server serves {', '.join(served[:_SHOWN_NAMES])}{more}",
            param="model",
            code="model_not_found",
        )

    def require_pooling(self) -> ServedPooling:
        """Return what the server pools. Raise InvalidRequest if it generates text."""
        if self.pooling is None:
            raise InvalidRequest(
                f"model: {self.model_names[0]} is served to generate text, and has neither embeddings nor scores; "
                "start the server with --runner pooling to serve them instead",
                param="model",
                code="unsupported_task",
            )
        return self.pooling

    def check_generates(self) -> None:
        """Raise InvalidRequest if the server pools, so that it generates no text."""
        if self.pooling is not None:
            routes = "/v1/rerank or /v1/score" if self.pooling.scores else "/v1/embeddings or /v1/rerank"
            raise InvalidRequest(
                f"model: {self.model_names[0]} is served without generating text; send POST {routes}, or start the "
                "server with --runner generate",
                param="model",
                code="unsupported_task",
            )

    async def require_model(self, name: str | None) -> None:
        """Check a model name; wait until an adapter can answer. Raise NotFound, Unavailable."""
        self.check_model(name)
        if self.adapters is not None and name is not None and name not in self.model_names:
            self.ready()  # an engine that starts is no reason to wait: the gateway knows other replicas
            await self.adapters.require(name)

    def adapter_of(self, name: str | None) -> int | None:
        """Return the number of the adapter that a model name stands for; None for the model. Raise NotFound."""
        if self.adapters is None or name is None or name in self.model_names:
            return None
        number = self.adapters.served(name)
        if number is None:
            self.check_base(name)
        return number

    def answer_name(self, name: str | None) -> str:
        """Return the model name in answers: that of the adapter, else the first of the model."""
        is_adapter = self.adapters is not None and name is not None and name not in self.model_names
        return str(name) if is_adapter else self.model_names[0]

    def ready(self) -> Ready:
        """Return the report of the running engine. Raises Unavailable while it is not ready."""
        ready = self.engine.ready
        if ready is None:
            raise unavailable(self.engine.state)
        return ready

    async def render(self, conversation: Conversation) -> str:
        """Return the prompt of a conversation. Raises InvalidRequest, Unavailable."""
        if self.renderer is None:
            raise InvalidRequest(
                "messages: this model has no chat template; use /v1/completions, or start the server with "
                "--chat-template",
                code="no_chat_template",
            )
        return await self.renderer.render(conversation)

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Return the token ids of each text."""

        def encode_all() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) > _LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode_all)
        return encode_all()


def context_of(request: Request) -> Context:
    """Return the context of the server that handles a request."""
    context: Context = request.app.state.context
    return context
