"""The route POST /v1/chat/completions: messages go through the model's chat template, answers have OpenAI's form."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.errors import RequestError
from quire_engine.server.context import Context, context_of
from quire_engine.server.generation.choice import Choice, Delta
from quire_engine.server.generation.streaming import respond
from quire_engine.server.http import sse
from quire_engine.server.http.body import body_schema
from quire_engine.server.openai.answer_parts import AnswerPlan
from quire_engine.server.openai.chat_generation import start_chat
from quire_engine.server.openai.chat_schemas import ChatCompletionRequest
from quire_engine.server.openai.logprobs import chat_logprobs, prompt_logprobs
from quire_engine.server.openai.requests import created_at, read_request
from quire_engine.server.openai.usage import UsageReport

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatCompletionRequest))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    with context.bodies.lease() as held:
        body = await read_request(request, context, ChatCompletionRequest, held)
        generation, plan = await start_chat(request, context, body, arrived)
    writer = ChatWriter(
        context, body, f"chatcmpl-{request.state.request_id}", created_at(request), generation.choices, plan
    )
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=body.stream or False, keepalive_seconds=keepalive)


def _joined(first: Delta, second: Delta) -> Delta:
    """Return the tokens of both deltas."""
    return replace(second, token_ids=first.token_ids + second.token_ids, logprobs=first.logprobs + second.logprobs)


class ChatWriter:
    """A writer of the answers to one conversation."""

    def __init__(
        self,
        context: Context,
        body: ChatCompletionRequest,
        id: str,
        created: int,
        choices: Sequence[Choice],
        plan: AnswerPlan,
    ) -> None:
        self._tokenizer = context.tokenizer
        self._body = body
        self._choices = choices
        head = {"created": created, "model": context.answer_name(body.model)}
        self._whole_head = {"id": id, "object": "chat.completion", **head}
        self._chunk_head = {"id": id, "object": "chat.completion.chunk", **head}
        self._usage = UsageReport(choices, len(choices), body.stream_options)
        answers = [plan.answer(context.tokenizer) for _ in choices]
        # By answer; empty where answers are plain text.
        self._parsed = [answer for answer in answers if answer is not None]
        if any(answer.reasoning_tokens is not None for answer in self._parsed):
            self._usage.reasoning_tokens = lambda: sum(answer.reasoning_tokens or 0 for answer in self._parsed)
        self._held: dict[int, Delta] = {}
        self._started: set[int] = set()
        # By answer, if nothing but the text changes from event to event.
        self._plain: dict[int, sse.TextEvent] = {}

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta; the first event of an answer has its role."""
        plain = self._plain.get(delta.index)
        if plain is not None and delta.finish_reason is None:
            return plain.event(delta.text)
        opening = self._opening(delta.index)
        if self._parsed:
            return opening + self._parsed_events(delta)
        part = {"content": delta.text} if delta.text else {}
        return opening + self._event(delta, part, delta.finish_reason, delta.stop_reason)

    def _opening(self, index: int) -> bytes:
        """Return the first event of an answer, if it was not sent before."""
        if index in self._started:
            return b""
        self._started.add(index)
        first: dict[str, Any] = {"delta": {"role": "assistant", "content": ""}}
        # The first of the answers reports the prompt, before its own first token.
        about_prompt = self._about_prompt() if index == 0 else {}
        if not (self._parsed or self._body.logprobs or self._body.return_token_ids or self._usage.in_every_chunk):
            self._plain[index] = sse.TextEvent(lambda text: self._payload(index, {"delta": {"content": text}}, None))
        return sse.event({**self._payload(index, first, None), **about_prompt})

    def _parsed_events(self, delta: Delta) -> bytes:
        """Return the events of the parts that the delta completes; the first has the tokens, also of earlier deltas."""
        index = delta.index
        parsed = self._parsed[index]
        parts = parsed.deltas(delta)
        held = self._held.pop(index, None)
        tokens = delta if held is None else _joined(held, delta)
        if delta.finish_reason is None and not parts:
            self._held[index] = tokens
            return b""
        *before, last = parts or [{}]
        events = []
        for part in before:
            events.append(self._event(tokens, part))
            tokens = replace(tokens, token_ids=[], logprobs=[])
        events.append(self._event(tokens, last, parsed.finish_reason(delta), delta.stop_reason))
        return b"".join(events)

    def _event(
        self,
        tokens: Delta,
        part: dict[str, Any],
        finish_reason: str | None = None,
        stop_reason: str | int | None = None,
    ) -> bytes:
        """Return the event of a new part of the message and its tokens."""
        choice: dict[str, Any] = {"delta": part}
        if tokens.logprobs:
            choice["logprobs"] = self._logprobs(tokens)
        if self._body.return_token_ids:
            choice["token_ids"] = tokens.token_ids
        if stop_reason is not None:
            choice["stop_reason"] = stop_reason
        return sse.event(self._payload(tokens.index, choice, finish_reason))

    def _payload(self, index: int, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        whole = {"index": index, "logprobs": None, "finish_reason": finish_reason, **choice}
        return {**self._chunk_head, "choices": [whole], **self._usage.chunk_fields()}

    def _about_prompt(self) -> dict[str, Any]:
        """Return the fields that report the prompt, if the request asks for any."""
        fields: dict[str, Any] = {}
        first = self._choices[0]
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = list(first.prompt_token_ids)
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, first.prompt_logprobs, self._body.prompt_logprobs
            )
        return fields

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far."""
        return self._usage.usage()

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        return self._usage.last_events(self._chunk_head)

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""
        return sse.error_event(error)

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        written = [self._answer(answer) for answer in answers]
        return msgspec.json.encode(
            {**self._whole_head, "choices": written, "usage": self._usage.usage(), **self._about_prompt()}
        )

    def _answer(self, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        finish_reason: str | None = whole.finish_reason
        if self._parsed:
            parsed = self._parsed[whole.index]
            message = parsed.message(whole)
            finish_reason = parsed.finish_reason(whole)
        answer: dict[str, Any] = {
            "index": whole.index,
            "message": message,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": whole.stop_reason,
        }
        if self._body.logprobs:
            answer["logprobs"] = self._logprobs(whole)
        if self._body.return_token_ids:
            answer["token_ids"] = whole.token_ids
        return answer

    def _logprobs(self, delta: Delta) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, delta.logprobs, self._body.top_logprobs or 0)
