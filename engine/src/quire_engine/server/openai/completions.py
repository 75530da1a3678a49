"""POST /v1/completions: prompts of text or token ids, continued; answers as OpenAI writes them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.server import sse
from quire_engine.server.body import read_object, validated
from quire_engine.server.choice import Choice, Delta, new_choice
from quire_engine.server.context import Context, context_of
from quire_engine.server.generation import Routing, submit
from quire_engine.server.openai.docs import body_schema
from quire_engine.server.openai.later import take_out_later
from quire_engine.server.openai.logprobs import completion_logprobs, text_length
from quire_engine.server.openai.sampling import (
    ModelLimits,
    check_against_model,
    check_length,
    checked_prompt,
    of_nth,
    sampling_of,
    stop_rules,
    token_limit,
)
from quire_engine.server.openai.schemas import CompletionRequest
from quire_engine.server.openai.usage import usage_of
from quire_engine.server.streaming import answer

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's, when a completion sets no limit."""


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or several prompts, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    context.lifecycle.check_open()
    content = await read_object(request, context.options.max_body_bytes)
    body = validated(CompletionRequest, content, lenient=context.options.lenient, reasons=take_out_later(content))
    context.check_model(body.model)
    limits = context.limits()
    check_against_model(body, body.logprobs, limits)
    n = body.n or 1
    context.desk.admission.check_count(n * len(body.prompt))
    prompts = await _prompts(context, body, limits)
    choices, params = [], []
    for number, (prompt, max_tokens) in enumerate(
        zip(prompts, token_limit(prompts, body.max_tokens, _DEFAULT_MAX_TOKENS, limits), strict=True)
    ):
        sampling = sampling_of(body, max_tokens=max_tokens, logprobs=body.logprobs, defaults=context.sampling_defaults)
        for i in range(n):
            choices.append(
                new_choice(context.tokenizer, number * n + i, prompt, stop_rules(body), sampling.stop_token_ids)
            )
            params.append(of_nth(sampling, i))
    routing = Routing(
        arrival_time=arrived,
        priority=body.priority,
        caller=request.state.caller,
        cache_salt=body.cache_salt,
    )
    generation = submit(context.desk, choices, params, routing)
    writer = CompletionWriter(context, body, f"cmpl-{request.state.request_id}", choices)
    return await answer(request, generation, writer, stream=body.stream or False)


async def _prompts(context: Context, body: CompletionRequest, limits: ModelLimits) -> list[list[int]]:
    texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
    ids = [prompt for prompt in body.prompt if not isinstance(prompt, str)]
    check_length(texts, "prompt", limits)
    encoded = await context.encode(texts, add_special_tokens=body.add_special_tokens)
    return [checked_prompt(prompt, body, limits) for prompt in (*encoded, *ids)]


class CompletionWriter:
    def __init__(self, context: Context, body: CompletionRequest, id: str, choices: Sequence[Choice]) -> None:
        self._tokenizer = context.tokenizer
        self._body = body
        self._choices = choices
        self._head = {"id": id, "object": "text_completion", "created": int(time.time()), "model": body.model}
        options = body.stream_options
        self._usage_at_end = bool(options and options.include_usage)
        self._usage_always = bool(options and options.continuous_usage_stats)
        # Where the next token of each answer begins in its text.
        self._offsets = dict.fromkeys(range(len(choices)), 0)
        self._begun: set[int] = set()
        # By answer: where from event to event nothing but the text changes.
        self._plain: dict[int, sse.TextEvent] = {}

    def chunk(self, delta: Delta) -> bytes:
        plain = self._plain.get(delta.index)
        if plain is not None and delta.finish_reason is None:
            return plain.event(delta.text)
        chunk = sse.event(self._payload(delta))
        alone = self._body.logprobs is None and not self._body.return_token_ids and not self._usage_always
        if alone and delta.finish_reason is None:
            # Made after the first event, which may have the prompt in it.
            self._plain[delta.index] = sse.TextEvent(lambda text: self._payload(replace(delta, text=text)))
        return chunk

    def _payload(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta.index, delta.text, [delta], delta.finish_reason)
        chunk = {**self._head, "choices": [choice]}
        if self._usage_always:
            chunk["usage"] = usage_of(self._choices, self._body.n or 1)
        elif self._usage_at_end:
            chunk["usage"] = None
        return chunk

    def last(self, choices: list[Choice]) -> bytes:
        if not self._usage_at_end:
            return sse.DONE
        usage = usage_of(choices, self._body.n or 1)
        return sse.event({**self._head, "choices": [], "usage": usage}) + sse.DONE

    def whole(self, choices: list[Choice], deltas: list[Delta]) -> bytes:
        made = []
        for choice in choices:
            own = [delta for delta in deltas if delta.index == choice.index]
            text = "".join([delta.text for delta in own])
            made.append(self._choice(choice.index, text, own, choice.finish_reason))
        return msgspec.json.encode({**self._head, "choices": made, "usage": usage_of(choices, self._body.n or 1)})

    def _choice(self, index: int, text: str, deltas: list[Delta], finish_reason: str | None) -> dict[str, Any]:
        made: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        if index not in self._begun:
            self._begun.add(index)
            prompt = list(self._choices[index].prompt_token_ids)
            if self._body.echo:
                made["text"] = self._tokenizer.decode(prompt, skip_special_tokens=True) + text
            if self._body.return_token_ids:
                made["prompt_token_ids"] = prompt
        if self._body.return_token_ids:
            made["token_ids"] = [token_id for delta in deltas for token_id in delta.token_ids]
        if self._body.logprobs is not None:
            drawn = [one for delta in deltas for one in delta.logprobs]
            made["logprobs"] = completion_logprobs(self._tokenizer, drawn, self._body.logprobs, self._offsets[index])
            self._offsets[index] += text_length(self._tokenizer, drawn)
        return made
