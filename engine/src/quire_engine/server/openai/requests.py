"""The common part of the two generation routes: from the body of a request to a generation that runs.

``read_request`` checks the body by itself, ``validate`` checks it against the model, ``start_generation`` submits its
sequences. Each raises RequestError.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any, TypeVar

from starlette.requests import Request

from quire_common.contract.engine import RESUMABLE_HEADER
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarSpec
from quire_engine.server.context import Context
from quire_engine.server.generation.choice import Choice, new_choice
from quire_engine.server.generation.generation import Generation, Preparation, Routing, submit
from quire_engine.server.generation.resumption import Resumption, checked, obstacle, started, take_resumption
from quire_engine.server.http.body import MAX_TOKEN_IDS, read_object, validate_large_body
from quire_engine.server.http.body_budget import BodyLease
from quire_engine.server.openai.grammars import grammar_of
from quire_engine.server.openai.limits import (
    ModelLimits,
    check_against_model,
    check_length,
    check_lengths,
    check_report_size,
    check_sampling,
    checked_prompt,
    token_limit,
)
from quire_engine.server.openai.sampling import bad_words_of, of_nth, sampling_params, stop_rules
from quire_engine.server.openai.schemas import GenerationRequest, Strict
from quire_engine.server.openai.unsupported import UNSUPPORTED, Unsupported, remove_empty, remove_unsupported

MAX_TOKENS_HEADER = "x-quire-max-tokens"
"""The limit that applies to an answer, where the context has less room than the client's limit."""
_PROMPTS_AT_ONCE = 50
"""The prompts to check before the event loop may serve others."""

Body = TypeVar("Body", bound=Strict)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """The maximum length of the answers to one request, and their reports on the prompt."""

    param: str
    """The field that contains the prompt, for errors."""
    max_tokens: int | None
    """The client's limit; None where it sets none."""
    default_max_tokens: int | None
    """The limit that applies otherwise; None allows as many tokens as the model's context has room for."""
    reserved_tokens: int | None
    """The room for the answer that ``truncate_prompt_tokens`` -1 leaves."""
    logprobs: int | None
    prompt_logprobs: int | None
    reports: int = 1
    """The number of answers to one prompt that report its logprobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRequest:
    """The prompts of a request that this model can answer, and for each the parameters of its first answer."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    headers: dict[str, str]
    """Response headers that say what was changed."""


async def read_request(
    request: Request,
    context: Context,
    schema: type[Body],
    held: BodyLease,
    *,
    unsupported: Unsupported = UNSUPPORTED,
) -> Body:
    """Read the body and check it by itself; ``held`` counts its bytes.

    ``unsupported`` are the fields of the route's API that this version lacks.
    """
    context.lifecycle.check_open()
    context.check_generates()
    content = await read_content(request, context, held)
    reasons = remove_unsupported(content, schema.model_fields, unsupported)
    remove_empty(content, schema.model_fields)
    body = await validate_large_body(
        schema, content, lenient=context.options.lenient, reasons=reasons, num_bytes=held.num_bytes
    )
    await context.require_model(getattr(body, "model", None))
    return body


async def read_content(request: Request, context: Context, held: BodyLease) -> dict[str, Any]:
    """Read the JSON object in the body, and check the lengths of its arrays before anything walks through them."""
    ready = context.engine.ready
    most = MAX_TOKEN_IDS if ready is None else max(MAX_TOKEN_IDS, ready.max_model_len)
    content = await read_object(request, context.options.max_body_bytes, held, max_token_ids=most)
    request.state.resume = take_resumption(request, content)
    if ready is not None:
        check_lengths(content, ready.max_model_len, context.services.queue)
    return content


async def _compiled(context: Context, body: GenerationRequest, constraint: GrammarSpec | None) -> str | None:
    """Return the grammar of the answers for the engine; None for any text. Raises InvalidRequest, Unavailable."""
    try:
        spec = grammar_of(body) if constraint is None else constraint
        return None if spec is None else await context.grammars.compile(spec)
    except InvalidRequest:
        context.metrics.rejected["grammar"] += 1
        raise


async def validate(
    context: Context,
    body: GenerationRequest,
    prompts: Sequence[str | list[int]],
    answer: AnswerLimits,
    *,
    add_special_tokens: bool,
    constraint: GrammarSpec | None = None,
) -> ValidatedRequest:
    """Check a request against the model, compile its grammar, and encode the prompts that are text.

    ``constraint`` is one that the route derives, such as from tools; otherwise the fields of the request name it.
    """
    limits = ModelLimits.of(context)
    check_against_model(body, answer.logprobs, limits)
    grammar = await _compiled(context, body, constraint)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    check_length(texts, answer.param, limits.max_model_len)
    encoded = await context.encode(texts, add_special_tokens=add_special_tokens)
    ids = [*encoded, *(prompt for prompt in prompts if not isinstance(prompt, str))]
    for number, prompt in enumerate(ids):
        if number % _PROMPTS_AT_ONCE == _PROMPTS_AT_ONCE - 1:
            await asyncio.sleep(0)
        ids[number] = checked_prompt(prompt, body, answer.reserved_tokens, limits)
    bad_words = bad_words_of(body, context.tokenizer, limits)
    params = []
    for max_tokens in token_limit(ids, answer.max_tokens, answer.default_max_tokens, limits, param=answer.param):
        made = sampling_params(
            body,
            max_tokens=max(1, max_tokens),
            logprobs=answer.logprobs,
            prompt_logprobs=answer.prompt_logprobs,
            bad_words=bad_words,
            grammar=grammar,
            defaults=context.sampling_defaults,
        )
        check_sampling(made, limits)
        params.append(made)
    check_report_size(ids, params[0], times=answer.reports)
    least = min(sampling.max_tokens for sampling in params)
    clamped = answer.max_tokens is not None and least < answer.max_tokens
    return ValidatedRequest(prompts=ids, params=params, headers={MAX_TOKENS_HEADER: str(least)} if clamped else {})


def start_generation(
    request: Request,
    context: Context,
    body: GenerationRequest,
    valid: ValidatedRequest,
    preparation: Preparation,
    *,
    answers: int,
    arrived: float,
    shown_ids: frozenset[int] = frozenset(),
) -> Generation:
    """Submit ``answers`` sequences for each prompt, in the place of ``preparation``.

    ``arrived`` is the monotonic time at which the request came in, and ``shown_ids`` are special tokens that the
    answers' text contains.
    """
    choices: list[Choice] = []
    params: list[SamplingParams] = []
    for prompt, first in zip(valid.prompts, valid.params, strict=True):
        for number in range(answers):
            rules, stops = stop_rules(body, shown_ids), first.stop_token_ids
            choices.append(new_choice(context.tokenizer, len(choices), prompt, rules, stops, context.end_token_id))
            params.append(of_nth(first, number))
    resumption, headers = _resumption(request, context, choices, params[0], is_stream=body.stream or False)
    if resumption is not None:
        params = [replace(params[0], seed=resumption.seed)]
    routing = Routing(
        arrival_time=arrived,
        priority=body.priority,
        identity=request.state.identity,
        cache_salt=body.cache_salt,
        adapter=context.adapter_of(body.model),
        output_token_ids=() if resumption is None else resumption.token_ids,
    )
    request.state.answer_headers = valid.headers | headers
    request.state.resumption = resumption
    return submit(context.services, choices, params, routing, preparation)


def created_at(request: Request) -> int:
    """Return the time of an answer that was started, in Unix seconds: for a continued one, that of its start."""
    resumption: Resumption | None = request.state.resumption
    return int(time()) if resumption is None else resumption.created


def _resumption(
    request: Request, context: Context, choices: Sequence[Choice], params: SamplingParams, *, is_stream: bool
) -> tuple[Resumption | None, dict[str, str]]:
    """Return how the stream can be continued, or None, and the response header that says so."""
    given: Resumption | None = request.state.resume
    if given is not None:
        checked(request.url.path, given, choices, params, vocab_size=context.vocab_size)
    elif not is_stream or RESUMABLE_HEADER not in request.headers or not context.options.resumable_streams:
        return None, {}
    elif (reason := obstacle(request.url.path, choices, params)) is not None:
        return None, {RESUMABLE_HEADER: f"no: {reason}"}
    resumption = started(choices[0].prompt_token_ids, params.seed) if given is None else given
    return resumption, {RESUMABLE_HEADER: "yes"}
