"""Requests of rerankers that a limit refuses cost no rendering."""

from collections.abc import Callable
from typing import Any

import pytest
from inline_renderer import InlineRenderer

from quire_engine.api.pooling import ServedPooling
from quire_engine.api.rendering_worker import Conversation
from quire_engine.config import AdmissionOptions, PoolingSetup
from quire_engine.core.sampling_params import Pooling
from quire_engine.text.chat_template import ChatTemplate

RERANKER = ServedPooling(
    setup=PoolingSetup(task="score", hidden_size=8),
    pooling=Pooling(token_ids=(1,)),
    first_ids=(),
    last_ids=(),
    has_pair_template=True,
)
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class CountingRenderer(InlineRenderer):
    """A renderer that counts conversations."""

    count = 0

    async def render(self, conversation: Conversation) -> str:
        self.count += 1
        return await super().render(conversation)


@pytest.mark.parametrize(
    ("queued", "document", "status", "code"),
    [(0, "b" * 9000, 400, "context_length_exceeded"), (2, "b", 429, "queue_full")],
)
@pytest.mark.parametrize(
    ("path", "query", "documents"), [("/v1/rerank", "query", "documents"), ("/v1/score", "text_1", "text_2")]
)
async def test_refused_pairs_are_not_rendered(
    serving: Callable[..., Any],
    queued: int,
    document: str,
    status: int,
    code: str,
    path: str,
    query: str,
    documents: str,
) -> None:
    renderer = CountingRenderer(ChatTemplate(TEMPLATE, {}))
    admission = AdmissionOptions(max_queued_requests=3)
    async with serving(pooling=RERANKER, renderer=renderer, admission=admission, max_model_len=32) as server:
        server.queue.reserve([1] * queued, 0.0)
        answer = await server.http.post(path, json={query: "a", documents: ["b", document]})
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["code"] == code and renderer.count == 0
        assert server.queue.requests == queued
