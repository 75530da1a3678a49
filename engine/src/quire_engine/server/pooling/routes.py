"""The routes POST /v1/embeddings, /v1/rerank and /v1/score, in the forms of OpenAI, of Jina and Cohere, and of vLLM."""

import asyncio
from collections.abc import Callable, Sequence
from time import time
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.server.context import Context, context_of
from quire_engine.server.generation.generation import Preparation
from quire_engine.server.http.body import body_schema
from quire_engine.server.openai.limits import check_length
from quire_engine.server.pooling.prompts import pair_prompt
from quire_engine.server.pooling.schemas import EmbeddingRequest, RerankRequest, ScoreRequest
from quire_engine.server.pooling.served import ServedPooling
from quire_engine.server.pooling.service import ReadPrompt, check_count, read_body, read_prompts
from quire_engine.server.pooling.vectors import base64_of, embedding, relevance, similarity
from quire_engine.server.rendering.conversation import Conversation

router = APIRouter()

_JSON = "application/json"
_MANY_VALUES = 20_000
"""More values of embeddings are computed and encoded in a thread, so that the event loop can serve others meanwhile."""


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def embeddings(request: Request) -> Response:
    """Return the embeddings of one or several inputs."""
    context = context_of(request)
    arrived = context.now()
    served = context.require_pooling()
    served.check_embeds(context.model_names[0])
    with context.bodies.lease() as held:
        body = await read_body(request, context, EmbeddingRequest, held, ("input",))
        served.check_dimensions(body.dimensions)
        places = _places("input", body.input)
        read = await read_prompts(
            request,
            context,
            served,
            body,
            body.input,
            places,
            add_special_tokens=body.add_special_tokens,
            arrived=arrived,
        )
    head = {"object": "list", "model": context.answer_name(body.model)}
    return await _written(read, lambda: {**head, "data": _embeddings(read, served, body)})


def _embeddings(read: Sequence[ReadPrompt], served: ServedPooling, body: EmbeddingRequest) -> list[dict[str, Any]]:
    normalize = served.setup.normalize if body.normalize is None else body.normalize
    data = []
    for index, prompt in enumerate(read):
        divisor = prompt.num_tokens if served.pooling.mean else 1
        vector = embedding(prompt.parts, divisor=divisor, dimensions=body.dimensions, normalize=normalize)
        values = base64_of(vector) if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": values})
    return data


@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/rerank", openapi_extra=body_schema(RerankRequest))
async def rerank(request: Request) -> Response:
    """Return documents by their relevance for a query."""
    context = context_of(request)
    arrived = context.now()
    served = context.require_pooling()
    with context.bodies.lease() as held:
        body = await read_body(request, context, RerankRequest, held, ("documents",))
        read, score = await _scored(
            request, context, served, body, [body.query], body.documents, ("query", "documents"), arrived
        )

    def ranking() -> dict[str, Any]:
        scores = score()
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: body.top_n or None]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if body.return_documents is not False:
            for result in results:
                result["document"] = {"text": body.documents[result["index"]]}
        return {
            "id": f"rerank-{request.state.request_id}",
            "model": context.answer_name(body.model),
            "results": results,
        }

    return await _written(read, ranking)


@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
@router.post("/score", openapi_extra=body_schema(ScoreRequest))
async def score(request: Request) -> Response:
    """Return the relevance of pairs of texts: one with each of the others, or pair by pair."""
    context = context_of(request)
    arrived = context.now()
    served = context.require_pooling()
    with context.bodies.lease() as held:
        body = await read_body(request, context, ScoreRequest, held, ("text_1", "text_2"))
        read, scores = await _scored(
            request, context, served, body, body.text_1, body.text_2, ("text_1", "text_2"), arrived
        )
    head = {
        "id": f"score-{request.state.request_id}",
        "object": "list",
        "created": int(time()),
        "model": context.answer_name(body.model),
    }
    return await _written(
        read,
        lambda: {
            **head,
            "data": [{"object": "score", "index": index, "score": value} for index, value in enumerate(scores())],
        },
    )


async def _scored(
    request: Request,
    context: Context,
    served: ServedPooling,
    body: RerankRequest | ScoreRequest,
    queries: list[str],
    documents: list[str],
    names: tuple[str, str],
    arrived: float,
) -> tuple[list[ReadPrompt], Callable[[], list[float]]]:
    """Return what was read, and a function that computes the score of each document with its query, or the only one.

    A reranker reads each pair as one prompt; an embedding model reads each text, and the score is their similarity.
    """
    places = _places(names[1], documents)
    paired = queries * len(documents) if len(queries) == 1 else queries
    if served.scores:
        if body.truncate_prompt_tokens is None:
            check_length(queries, names[0], context.ready().max_model_len)
            check_length(documents, names[1], context.ready().max_model_len)
        pairs = list(zip(paired, documents, strict=True))
        # A pair has at least one token.
        with Preparation(context.services, request.state.identity, [1] * len(pairs)):
            prompts = [await _pair_prompt(context, served, *pair, body.instruction) for pair in pairs]
    else:
        check_count(len(queries) + len(documents), names[1], context.services.queue)
        prompts = [*queries, *documents]
        places = [*_places(names[0], queries), *places]
    read = await read_prompts(
        request,
        context,
        served,
        body,
        prompts,
        places,
        add_special_tokens=not served.scores,
        arrived=arrived,
    )

    def scores() -> list[float]:
        if served.scores:
            return [relevance(prompt.parts) for prompt in read]
        vectors = [embedding(prompt.parts, divisor=1, dimensions=None, normalize=True) for prompt in read]
        first, others = vectors[: len(queries)], vectors[len(queries) :]
        pairs = zip(first * len(others) if len(first) == 1 else first, others, strict=True)
        return [similarity(one, other) for one, other in pairs]

    return read, scores


def _places(name: str, texts: Sequence[str | list[int]]) -> list[str]:
    """Return the path of each text in a field."""
    return [name] if len(texts) == 1 else [f"{name}[{number}]" for number in range(len(texts))]


async def _pair_prompt(
    context: Context, served: ServedPooling, query: str, document: str, instruction: str | None
) -> str:
    if not served.has_pair_template:
        return pair_prompt(query, document, instruction)
    system = [] if instruction is None else [{"role": "system", "content": instruction}]
    pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    return await context.render(Conversation(messages=[*system, *pair]))


async def _written(read: Sequence[ReadPrompt], answer: Callable[[], dict[str, Any]]) -> Response:
    """Return the answer as JSON. The usage comes last, where a gateway reads it."""
    tokens = sum(prompt.num_tokens for prompt in read)

    def write() -> bytes:
        return msgspec.json.encode({**answer(), "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})

    values = sum(len(part) for prompt in read for part in prompt.parts) // 4
    return Response(await asyncio.to_thread(write) if values > _MANY_VALUES else write(), media_type=_JSON)
