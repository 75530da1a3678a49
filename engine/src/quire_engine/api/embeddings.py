"""The routes POST /v1/embeddings, /v1/rerank and /v1/score, in the forms of OpenAI, of Jina and Cohere, and of vLLM."""

import asyncio
import math
import sys
from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul
from time import time
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema, field_validator, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api.body import MAX_TOKEN_IDS, BodyLease, body_schema, json_type, read_object, validate_large_body
from quire_engine.api.context import Context, context_of
from quire_engine.api.generation import (
    Generation,
    Preparation,
    QueueLimit,
    Routing,
    submit,
)
from quire_engine.api.limits import check_length, check_priority
from quire_engine.api.output import StopRules, new_choice
from quire_engine.api.pooling import ServedPooling, check_prompts, pair_prompt, truncated
from quire_engine.api.rendering_worker import Conversation
from quire_engine.api.schemas import Prompt, Strict, TruncatedTo, remove_empty
from quire_engine.api.stream import DisconnectWatch
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest


def _check_texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str | dict) else value
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"should be a string or an array of strings, not {json_type(value)}")
    return [_text(number, item) for number, item in enumerate(texts)]


def _text(number: int, item: Any) -> str:
    """Return the text of a string, or of an object in the form of Jina's and Cohere's APIs."""
    text = item.get("text") if isinstance(item, dict) and item.keys() == {"text"} else item
    if not isinstance(text, str):
        raise ValueError(f'item {number} should be a string or an object {{"text": ...}}, not {json_type(item)}')
    if not text:
        raise ValueError(f"item {number} is empty; it should have at least one character")
    return text


_text_object = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1}},
    "required": ["text"],
    "additionalProperties": False,
}
_text_schemas = [{"type": "string", "minLength": 1}, _text_object]
Texts = Annotated[
    SkipValidation[list[str]],
    BeforeValidator(_check_texts),
    WithJsonSchema({"anyOf": [*_text_schemas, {"type": "array", "items": {"anyOf": _text_schemas}, "minItems": 1}]}),
]


class PoolingRequest(Strict):
    """The fields of all requests that pool."""

    model: str | None = None
    truncate_prompt_tokens: TruncatedTo | None = Field(
        None, description="Keep this number of tokens of each prompt; -1 keeps as many as the context holds."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side on which truncate_prompt_tokens cuts; right unless set."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="Lower values run first. Needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Share cached prefixes only with requests that have the same salt."
    )
    user: str | None = None
    request_id: str | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("should be -1 or greater than 0")
        return value


class EmbeddingRequest(PoolingRequest):
    """The body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cut the embedding to its first dimensions, for models that are trained for it."
    )
    normalize: bool | None = Field(None, description="Scale to length 1; what the model's folder says unless set.")
    add_special_tokens: bool = True

    @field_validator("input")
    @classmethod
    def _no_text_is_empty(cls, value: list[str | list[int]]) -> list[str | list[int]]:
        if (empty := next((number for number, item in enumerate(value) if not item), None)) is not None:
            raise ValueError(f"item {empty} is empty; it should have at least one token")
        return value


class RerankRequest(PoolingRequest):
    """The body of POST /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Return only this number of documents.")
    return_documents: bool | None = Field(None, description="Return the texts with their scores; true unless set.")
    instruction: str | None = Field(None, description="The task that a reranker judges by.")


class ScoreRequest(PoolingRequest):
    """The body of POST /v1/score."""

    text_1: Texts
    text_2: Texts
    instruction: str | None = Field(None, description="The task that a reranker judges by.")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1: has {len(self.text_1)} texts and text_2 has {len(self.text_2)}; it should have one text, or "
                "one for each of text_2"
            )
        return self


Vector = Sequence[float]


def total(parts: Sequence[bytes]) -> Vector:
    """Return the sum of all parts of a prompt, each float32 in the byte order of the machine."""
    first, *others = [array("f", part) for part in parts]
    if not others:
        return first
    return [math.fsum(values) for values in zip(first, *others, strict=True)]


def embedding(parts: Sequence[bytes], *, divisor: int, dimensions: int | None, normalize: bool) -> "array[float]":
    """Return an embedding: the sum over ``divisor`` tokens divided by it, cut to ``dimensions``, then normalized."""
    values = total(parts)[:dimensions]
    scale = 1.0 / divisor
    if normalize:
        length = math.sqrt(dot(values, values))
        # Only the zero vector has no direction.
        scale = 1.0 / length if length else 1.0
    return array("f", [value * scale for value in values])


def dot(one: Vector, other: Vector) -> float:
    """Return the scalar product."""
    return math.fsum(map(mul, one, other))


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of the angle between two vectors; 0 if one of them is zero."""
    lengths = math.sqrt(dot(one, one) * dot(other, other))
    return dot(one, other) / lengths if lengths else 0.0


def relevance(parts: Sequence[bytes]) -> float:
    """Return the probability of relevance from the logit of the positive token and, if there is one, the negative's."""
    logits = total(parts)
    difference = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
    # Neither branch overflows.
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    return math.exp(difference) / (1.0 + math.exp(difference))


def base64_of(vector: "array[float]") -> str:
    """Return the vector as base64 of little-endian float32, as in OpenAI's API."""
    if sys.byteorder == "big":
        vector = array("f", vector)
        vector.byteswap()
    return b64encode(vector.tobytes()).decode("ascii")


Body = TypeVar("Body", bound=PoolingRequest)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """The values that the engine read at one prompt."""

    num_tokens: int
    parts: list[bytes]


async def read_body(
    request: Request, context: Context, schema: type[Body], held: BodyLease, lists: tuple[str, ...]
) -> Body:
    """Read the body and check it by itself; ``lists`` are the fields that have one prompt per item."""
    context.lifecycle.check_open()
    ready = context.ready()
    most = max(MAX_TOKEN_IDS, ready.max_model_len)
    content = await read_object(request, context.options.max_body_bytes, held, max_token_ids=most)
    check_counts(content, lists, context.services.queue)
    remove_empty(content, schema.model_fields)
    body = await validate_large_body(schema, content, lenient=context.options.lenient, num_bytes=held.num_bytes)
    await context.require_model(body.model)
    check_priority(body.priority, used=context.priorities)
    return body


def check_counts(content: dict[str, Any], lists: tuple[str, ...], queue: QueueLimit) -> None:
    """Raise InvalidRequest for more prompts than the queue accepts, before anything walks through them."""
    for name in lists:
        items = content.get(name)
        if isinstance(items, list) and items and not isinstance(items[0], int):
            check_count(len(items), name, queue)


def check_count(count: int, param: str, queue: QueueLimit) -> None:
    """Raise InvalidRequest for more prompts than the queue accepts."""
    try:
        queue.check_count(count)
    except InvalidRequest:
        raise InvalidRequest(
            f"{param}: has {count} items, more than the sequences that may be queued (--max-queued-requests); send "
            "them in several requests",
            param=param,
            code="too_many_inputs",
        ) from None


async def read_prompts(
    request: Request,
    context: Context,
    served: ServedPooling,
    body: PoolingRequest,
    prompts: Sequence[str | list[int]],
    places: Sequence[str],
    *,
    add_special_tokens: bool,
    arrived: float,
) -> list[ReadPrompt]:
    """Return the values of each prompt. Raises RequestError, ClientGone.

    ``places`` are the paths of the fields that contain the prompts, and ``arrived`` is the monotonic time at which the
    request came in.
    """
    limit = context.ready().max_model_len
    lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    with Preparation(context.services, request.state.identity, lengths) as preparation:
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        if body.truncate_prompt_tokens is None:
            check_length(texts, places[0].partition("[")[0], limit)
        encoded = iter(await context.encode(texts, add_special_tokens=add_special_tokens))
        ids = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
        if body.truncate_prompt_tokens is not None:
            kept = limit if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
            ids = [truncated(prompt, kept, body.truncation_side, served) for prompt in ids]
        check_prompts(ids, places, max_model_len=limit, vocab_size=context.vocab_size)
        generation = _submit(request, context, served, body, ids, preparation, arrived)
    await _finished(request, generation)
    return [ReadPrompt(num_tokens=len(choice.prompt_token_ids), parts=choice.pooled) for choice in generation.choices]


def _submit(
    request: Request,
    context: Context,
    served: ServedPooling,
    body: PoolingRequest,
    prompts: list[list[int]],
    preparation: Preparation,
    arrived: float,
) -> Generation:
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0, ignore_eos=True, pooling=served.pooling)
    rules = StopRules(at_once=True)
    choices = [new_choice(context.tokenizer, index, prompt, rules, (), None) for index, prompt in enumerate(prompts)]
    routing = Routing(
        arrival_time=arrived,
        priority=body.priority,
        identity=request.state.identity,
        cache_salt=body.cache_salt,
        adapter=context.adapter_of(body.model),
    )
    return submit(context.services, choices, [params] * len(choices), routing, preparation)


async def _finished(request: Request, generation: Generation) -> None:
    """Wait until every prompt is read; end them all if the client goes away."""
    watch = DisconnectWatch(request, generation.abandon)
    try:
        async for _ in generation.deltas():
            pass
    finally:
        watch.stop()
        generation.close()


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
