"""The route POST /v1/completions: it continues prompts of text or token ids; answers have OpenAI's form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api import stream
from quire_engine.api.body import body_schema
from quire_engine.api.context import Context, context_of
from quire_engine.api.generation import Generation, Preparation
from quire_engine.api.logprobs import CompletionLogprobs, joined, prompt_logprobs
from quire_engine.api.output import Choice, Delta
from quire_engine.api.request import (
    AnswerLimits,
    created_at,
    read_request,
    start_generation,
    validate,
)
from quire_engine.api.schemas import CompletionRequest
from quire_engine.api.stream import UsageReport, respond
from quire_engine.errors import RequestError
from quire_engine.text.detokenizer import open_end

router = APIRouter()

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's default, where a completion sets no limit."""


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def completions(request: Request) -> Response:
    """Continue one or several prompts, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    with context.bodies.lease() as held:
        body = await read_request(request, context, CompletionRequest, held)
        generation = await _start(request, context, body, arrived)
    writer = CompletionWriter(
        context, body, f"cmpl-{request.state.request_id}", created_at(request), generation.choices
    )
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=body.stream or False, keepalive_seconds=keepalive)


async def _start(request: Request, context: Context, body: CompletionRequest, arrived: float) -> Generation:
    answers = body.n or 1
    of_prompt = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    limits = AnswerLimits(
        param="prompt",
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        reserved_tokens=_DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=max(of_prompt, default=None),
        reports=answers,
    )
    # A text costs at least one token; token ids are counted.
    lengths = [1 if isinstance(prompt, str) else len(prompt) for prompt in body.prompt for _ in range(answers)]
    with Preparation(context.services, request.state.identity, lengths) as preparation:
        valid = await validate(context, body, body.prompt, limits, add_special_tokens=body.add_special_tokens)
        body.prompt = []  # the request lives as long as its answer, which needs the text no more
        return start_generation(request, context, body, valid, preparation, answers=answers, arrived=arrived)


class CompletionWriter:
    """A writer of the answers to one or several prompts."""

    def __init__(
        self, context: Context, body: CompletionRequest, id: str, created: int, choices: Sequence[Choice]
    ) -> None:
        self._tokenizer = context.tokenizer
        self._body = body
        self._choices = choices
        self._per_prompt = body.n or 1
        model = context.answer_name(body.model)
        self._head = {"id": id, "object": "text_completion", "created": created, "model": model}
        self._usage = UsageReport(choices, self._per_prompt, body.stream_options)
        self._logprobs = [
            CompletionLogprobs(
                context.tokenizer,
                body.logprobs or 0,
                skip_special_tokens=body.skip_special_tokens,
                before=b"" if body.echo else open_end(context.tokenizer, choice.prompt_token_ids),
            )
            for choice in choices
        ]
        self._started: set[int] = set()
        self._pending: list[Delta] = []
        # By answer, if nothing but the text changes from event to event.
        self._plain: dict[int, stream.TextEvent] = {}

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta, and of earlier ones that waited for the report of their prompt."""
        plain = self._plain.get(delta.index)
        if plain is not None and delta.finish_reason is None:
            return plain.event(delta.text)
        # One answer to a prompt reports it for all of them, and may be read after another answer.
        self._pending.append(delta)
        ready = [one for one in self._pending if self._prompt_is_reported(one.index)]
        self._pending = [one for one in self._pending if not self._prompt_is_reported(one.index)]
        return b"".join([self._event(one) for one in ready])

    def _event(self, delta: Delta) -> bytes:
        event = stream.event(self._payload(delta))
        alone = self._body.logprobs is None and not self._body.return_token_ids and not self._usage.in_every_chunk
        if alone and delta.finish_reason is None:
            # Created after the first event, which may contain the prompt.
            self._plain[delta.index] = stream.TextEvent(lambda text: self._payload(replace(delta, text=text)))
        return event

    def _payload(self, delta: Delta) -> dict[str, Any]:
        choice = self._choice(delta)
        return {**self._head, "choices": [choice], **self._usage.chunk_fields()}

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return self._usage.usage()

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        assert not self._pending, "a prompt that was never reported"
        return self._usage.last_events(self._head)

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""
        return stream.error_event(error)

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        written = [self._choice(answer) for answer in answers]
        return msgspec.json.encode({**self._head, "choices": written, "usage": self._usage.usage()})

    def _choice(self, delta: Delta) -> dict[str, Any]:
        index, sampled = delta.index, delta.logprobs
        answer: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": None,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }
        arrays = self._logprobs[index]
        about_prompt: dict[str, Any] = {}
        if index not in self._started:
            self._started.add(index)
            about_prompt = self._about_prompt(index)
        if echoed := about_prompt.pop("logprobs", None):
            answer["logprobs"] = joined(echoed, arrays.of_sampled(sampled))
        elif self._body.logprobs is not None:
            answer["logprobs"] = arrays.of_sampled(sampled)
        answer["text"] = about_prompt.pop("text", "") + delta.text
        if self._body.return_token_ids:
            answer["token_ids"] = delta.token_ids
        return {**answer, **about_prompt}

    # --- the report of a prompt, once per answer ---

    def _leader(self, index: int) -> Choice:
        return self._choices[index - index % self._per_prompt]

    def _prompt_is_reported(self, index: int) -> bool:
        wanted = self._body.prompt_logprobs is not None or (self._body.echo and self._body.logprobs is not None)
        leader = self._leader(index)
        return not wanted or len(leader.prompt_logprobs) == len(leader.prompt_token_ids) - 1

    def _echoed(self, leader: Choice) -> str:
        prompt = leader.prompt_token_ids
        text = self._tokenizer.decode(prompt, skip_special_tokens=self._body.skip_special_tokens)
        # Half a character at its end is shown together with the other half, which the answer contains.
        unfinished = not leader.at_once and open_end(self._tokenizer, prompt)
        return text.removesuffix("\ufffd") if unfinished else text

    def _about_prompt(self, index: int) -> dict[str, Any]:
        body, leader = self._body, self._leader(index)
        prompt = list(leader.prompt_token_ids)
        fields: dict[str, Any] = {}
        if body.echo:
            fields["text"] = self._echoed(leader)
            if body.logprobs is not None:
                fields["logprobs"] = self._logprobs[index].of_prompt(prompt, leader.prompt_logprobs, fields["text"])
        if body.return_token_ids:
            fields["prompt_token_ids"] = prompt
        if body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(self._tokenizer, leader.prompt_logprobs, body.prompt_logprobs)
        return fields
