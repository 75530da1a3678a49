"""The routes POST /tokenize and /detokenize, in vLLM's form: the tokens of a text, and the text of tokens."""

import asyncio
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api.body import BodyLease, body_schema, validate_large_body
from quire_engine.api.chat import Messages, TemplateFields, check_tools_are_rendered, conversation_of
from quire_engine.api.context import Context, context_of
from quire_engine.api.generation import Preparation
from quire_engine.api.limits import check_length, check_token_ids
from quire_engine.api.request import read_content
from quire_engine.api.schemas import Strict, Tokens, remove_empty, remove_unsupported
from quire_engine.text.tokenizer import Tokenizer

router = APIRouter()


class TokenizeRequest(TemplateFields):
    """A prompt, or messages and the fields of a chat that are part of its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages unless set.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is required")
        for name, field in TemplateFields.model_fields.items() if self.messages is None else ():
            if getattr(self, name) not in (field.default, [], {}):
                raise ValueError(f"{name}: is only allowed with messages")
        both = self.continue_final_message and self.add_generation_prompt
        if both and "add_generation_prompt" in self.model_fields_set:
            raise ValueError("continue_final_message: needs add_generation_prompt set to false")
        return self


class DetokenizeRequest(Strict):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Tokens


_Body = TypeVar("_Body", TokenizeRequest, DetokenizeRequest)


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, or of messages through the chat template."""
    context = context_of(request)
    with context.bodies.lease() as held:
        body = await _read(request, context, TokenizeRequest, held)
        ready = context.engine.ready
        max_model_len = None if ready is None else ready.max_model_len
        with Preparation(context.services, request.state.identity, [len(body.messages or "x")]):
            ids = await _token_ids(context, body, max_model_len)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(_token_strs, context.tokenizer, ids)
    return Response(msgspec.json.encode(answer), media_type="application/json")


async def _token_ids(context: Context, body: TokenizeRequest, max_model_len: int | None) -> list[int]:
    if body.messages is None:
        text, special = body.prompt or "", body.add_special_tokens is not False
    else:
        check_tools_are_rendered(context, body)
        conversation = conversation_of(context, body, body.messages)
        text, special = await context.render(conversation), body.add_special_tokens is True
    if max_model_len is not None:
        check_length([text], "prompt" if body.messages is None else "messages", max_model_len)
    (ids,) = await context.encode([text], add_special_tokens=special)
    return ids


def _token_strs(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, of at most as many as the model's context holds."""
    context = context_of(request)
    with context.bodies.lease() as held:
        body = await _read(request, context, DetokenizeRequest, held)
        check_token_ids(body.tokens, "tokens", context.vocab_size)
        with Preparation(context.services, request.state.identity, [max(1, len(body.tokens))]):
            # In a thread, so that the event loop can serve others meanwhile.
            text = await asyncio.to_thread(context.tokenizer.decode, body.tokens)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")


async def _read(request: Request, context: Context, schema: type[_Body], held: BodyLease) -> _Body:
    content = await read_content(request, context, held)
    reasons = remove_unsupported(content, schema.model_fields)
    remove_empty(content, schema.model_fields)
    body = await validate_large_body(
        schema, content, lenient=context.options.lenient, reasons=reasons, num_bytes=held.num_bytes
    )
    if body.model is not None:
        context.check_model(body.model)
    return body
