"""The common part of the generation routes: from the body of a request to a generation that runs.

Sampling parameters and the grammar are the client's values, else the model's defaults.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from quire_common.contract.engine import RESUMABLE_HEADER
from quire_engine.api.body import MAX_TOKEN_IDS, BodyLease, read_object, validate_large_body
from quire_engine.api.context import Context
from quire_engine.api.generation import (
    Generation,
    Preparation,
    Routing,
    submit,
)
from quire_engine.api.limits import (
    ModelLimits,
    check_against_model,
    check_length,
    check_lengths,
    check_report_size,
    check_sampling,
    checked_prompt,
    token_limit,
)
from quire_engine.api.output import Choice, StopRules, new_choice
from quire_engine.api.schemas import (
    UNSUPPORTED,
    GenerationRequest,
    ResponseFormat,
    Strict,
    StructuredOutputs,
    Unsupported,
    remove_empty,
    remove_unsupported,
)
from quire_engine.api.stream import (
    Resumption,
    checked,
    obstacle,
    started,
    take_resumption,
)
from quire_engine.core.sampling_params import FIELD_NAMES, SamplingParams
from quire_engine.errors import InvalidRequest
from quire_engine.grammar.spec import GrammarKind, GrammarSpec
from quire_engine.text.model_text import SamplingDefaults
from quire_engine.text.tokenizer import Tokenizer

_encode = msgspec.json.Encoder(decimal_format="number").encode
_ANY_OBJECT = '{"type":"object"}'


def grammar_of(request: GenerationRequest) -> GrammarSpec | None:
    """Return the constraint of a request's answers; None for any text. Raises InvalidRequest."""
    specs = [
        spec
        for spec in (_response_format(request.response_format), _structured(request.structured_outputs))
        if spec is not None
    ]
    specs += _guided(request)
    if len(specs) > 1:
        names, second = " and ".join(spec.param for spec in specs), specs[1]
        raise InvalidRequest(f"{second.param}: a request can have one constraint, but has {names}", param=second.field)
    return specs[0] if specs else None


def _response_format(wanted: ResponseFormat | None) -> GrammarSpec | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, param="response_format")
    if wanted.type == "json_schema":
        assert wanted.json_schema is not None
        return _spec("json_schema", wanted.json_schema.schema_, "response_format.json_schema.schema")
    names = ("format", "structures", "triggers")
    tag = {name: value for name in names if (value := getattr(wanted, name)) is not None}
    return _spec("structural_tag", tag, "response_format")


def _structured(wanted: StructuredOutputs | None) -> GrammarSpec | None:
    if wanted is None:
        return None
    space = "" if wanted.disable_any_whitespace else wanted.whitespace_pattern
    if wanted.json_object:
        return GrammarSpec(
            kind="json_schema", text=_ANY_OBJECT, param="structured_outputs.json_object", whitespace_pattern=space
        )
    if wanted.json_ is not None:
        return _spec("json_schema", wanted.json_, "structured_outputs.json", space)
    if wanted.structural_tag is not None:
        return _spec("structural_tag", wanted.structural_tag, "structured_outputs.structural_tag")
    if wanted.choice is not None:
        return _spec("choice", wanted.choice, "structured_outputs.choice")
    if wanted.regex is not None:
        return GrammarSpec(kind="regex", text=wanted.regex, param="structured_outputs.regex")
    assert wanted.grammar is not None
    return GrammarSpec(kind="grammar", text=wanted.grammar, param="structured_outputs.grammar")


def _guided(request: GenerationRequest) -> list[GrammarSpec]:
    specs = []
    if request.guided_json is not None:
        specs.append(_spec("json_schema", request.guided_json, "guided_json", request.guided_whitespace_pattern))
    if request.guided_choice is not None:
        specs.append(_spec("choice", request.guided_choice, "guided_choice"))
    if request.guided_regex is not None:
        specs.append(GrammarSpec(kind="regex", text=request.guided_regex, param="guided_regex"))
    if request.guided_grammar is not None:
        specs.append(GrammarSpec(kind="grammar", text=request.guided_grammar, param="guided_grammar"))
    return specs


def _spec(kind: GrammarKind, value: Any, param: str, whitespace_pattern: str | None = None) -> GrammarSpec:
    """Return a constraint whose value is JSON, or a string of JSON."""
    try:
        text = value if isinstance(value, str) else _encode(value).decode()
        if isinstance(value, str):
            msgspec.json.decode(value)
    except (RecursionError, ValueError, OverflowError) as error:
        reason = "is nested too deeply" if isinstance(error, RecursionError) else f"is not JSON: {error}"
        field = param.partition(".")[0]
        raise InvalidRequest(f"{param}: {reason}", param=field, code="invalid_grammar") from error
    return GrammarSpec(kind=kind, text=text, param=param, whitespace_pattern=whitespace_pattern)


_GREEDY_BELOW = 1e-4
"""Below this temperature, logits would overflow float16; the likeliest token has all the probability far above it."""
_SEED_MASK = 2**63 - 1
_MAX_WORD_TOKENS = 64
"""The longest bad word, in tokens: the sampler keeps that many of the last tokens of each sequence."""


def stop_rules(request: GenerationRequest, shown_ids: frozenset[int] = frozenset()) -> StopRules:
    """Return the rules by which an answer to this request becomes text and ends; ``shown_ids`` are never skipped."""
    return StopRules(
        strings=tuple(request.stop or ()),
        at_once=request.max_tokens == 0,
        include=request.include_stop_str_in_output,
        min_tokens=request.min_tokens,
        skip_special_tokens=request.skip_special_tokens,
        shown_ids=shown_ids,
    )


def sampling_params(
    request: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    bad_words: Sequence[Sequence[int]],
    grammar: str | None = None,
    defaults: SamplingDefaults,
) -> SamplingParams:
    """Return the parameters of the first of n answers.

    A field that the request and SamplingParams have under one name is copied; only what needs a conversion is named.
    """
    given = {name: value for name in FIELD_NAMES if (value := getattr(request, name, None)) is not None}
    values: dict[str, Any] = {**defaults.params, **given}
    if (temperature := values.get("temperature")) is not None and temperature < _GREEDY_BELOW:
        values["temperature"] = 0.0
    if values.get("top_k", 0) < 1:
        values["top_k"] = None
    if request.seed is not None:
        values["seed"] = request.seed & _SEED_MASK
    values |= {
        "max_tokens": max_tokens,
        "logit_bias": tuple((request.logit_bias or {}).items()),
        "allowed_token_ids": None if request.allowed_token_ids is None else tuple(request.allowed_token_ids),
        "bad_words_token_ids": tuple(tuple(word) for word in bad_words),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "grammar": grammar,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return SamplingParams(**values)


def of_nth(sampling: SamplingParams, number: int) -> SamplingParams:
    """Return the parameters of answer ``number`` of n answers to one prompt.

    The first answer has the request's seed and reports the prompt for all of them. The seeds of the others are derived
    by a hash, so that they do not equal the seeds of other requests.
    """
    if number == 0:
        return sampling
    seed = None if sampling.seed is None else _derived_seed(sampling.seed, number)
    return replace(sampling, seed=seed, prompt_logprobs=None)


def _derived_seed(seed: int, number: int) -> int:
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + number.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def bad_words_of(request: GenerationRequest, tokenizer: Tokenizer, limits: ModelLimits) -> list[list[int]]:
    """Return the token sequences of the request's bad words, without and with a space before. Raises InvalidRequest."""
    sequences: list[list[int]] = []
    for word in request.bad_words or ():
        for text in (word.lstrip(), " " + word.lstrip()):
            ids = tokenizer.encode(text, add_special_tokens=False) if text.strip() else []
            if not ids or max(ids) >= limits.vocab_size:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens of this model", param="bad_words")
            if len(ids) > _MAX_WORD_TOKENS:
                raise InvalidRequest(
                    f"bad_words: {word!r} has {len(ids)} tokens; at most {_MAX_WORD_TOKENS} are accepted",
                    param="bad_words",
                )
            if ids not in sequences:
                sequences.append(ids)
    return sequences


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
