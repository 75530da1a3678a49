"""From the prompts of a request to the values that the engine reads at their tokens.

``read_body`` checks the body by itself, ``read_prompts`` encodes the prompts, submits them as one generation of
sequences that end with their prompt, and waits for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.server.context import Context
from quire_engine.server.generation.choice import StopRules, new_choice
from quire_engine.server.generation.generation import Generation, Preparation, Routing, submit
from quire_engine.server.generation.queue_limit import QueueLimit
from quire_engine.server.generation.streaming import DisconnectWatch
from quire_engine.server.http.body import MAX_TOKEN_IDS, read_object, validate_large_body
from quire_engine.server.http.body_budget import BodyLease
from quire_engine.server.openai.limits import check_length, check_priority
from quire_engine.server.openai.unsupported import remove_empty
from quire_engine.server.pooling.prompts import check_prompts, truncated
from quire_engine.server.pooling.schemas import PoolingRequest
from quire_engine.server.pooling.served import ServedPooling

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
