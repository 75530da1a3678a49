"""What the routes of one server share: made once by ``serve``, read everywhere, changed by nobody."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.requests import Request

from quire_engine.config import ServerOptions
from quire_engine.errors import NotFound, Unavailable
from quire_engine.ipc.client import EngineService
from quire_engine.ipc.messages import Ready
from quire_engine.server.generation.generation import Desk
from quire_engine.server.generation.lifecycle import Lifecycle
from quire_engine.server.observability.metrics import Metrics
from quire_engine.text.chat_template import ChatTemplate
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import Tokenizer

_STARTING_RETRY_SECONDS = 2
_LONG_TEXT_CHARACTERS = 4096
"""Above that a text is encoded in a thread: the event loop streams for others meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    options: ServerOptions
    model_names: tuple[str, ...]
    created: int
    """When this server started, in Unix seconds: what /v1/models calls the model's creation."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: SamplingDefaults
    vocab_size: int
    priorities: bool
    desk: Desk
    metrics: Metrics

    @property
    def engine(self) -> EngineService:
        return self.desk.engine

    @property
    def lifecycle(self) -> Lifecycle:
        return self.desk.lifecycle

    @property
    def now(self) -> Callable[[], float]:
        return self.desk.now

    def check_model(self, name: str) -> None:
        if name not in self.model_names:
            raise NotFound(
                f"the model {name[:100]!r} is not served here; this server has {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    def ready(self) -> Ready:
        """Raises Unavailable while there is no engine."""
        ready = self.engine.ready
        if ready is None:
            raise Unavailable(
                "the engine is starting; try again shortly",
                code="engine_starting",
                retry_after_seconds=_STARTING_RETRY_SECONDS,
            )
        return ready

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        def encode_all() -> list[list[int]]:
            return [self.tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

        if sum(map(len, texts)) > _LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(encode_all)
        return encode_all()


def context_of(request: Request) -> Context:
    context: Context = request.app.state.context
    return context
