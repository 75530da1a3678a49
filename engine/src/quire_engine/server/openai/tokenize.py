"""The routes POST /tokenize and /detokenize, in vLLM's form: the tokens of a text, and the text of tokens."""

import asyncio
from typing import Annotated, Any, Self

import msgspec
from fastapi import APIRouter
from pydantic import FailFast, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.errors import InvalidRequest
from quire_engine.server.context import context_of
from quire_engine.server.generation.generation import Preparation
from quire_engine.server.http.body import body_schema, read_object, validate_body
from quire_engine.server.openai.limits import check_length, longest_text
from quire_engine.server.openai.schemas import Messages, Strict, TemplateVariables
from quire_engine.server.rendering.conversation import Conversation

router = APIRouter()


class TokenizeRequest(Strict):
    """A prompt or messages to tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="True for a prompt, false for messages unless set.")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages is required")
        return self


class DetokenizeRequest(Strict):
    """Token ids to turn into text."""

    model: str | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], FailFast()]


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Return the token ids of a prompt, or of messages through the chat template."""
    context = context_of(request)
    content = await read_object(request, context.options.max_body_bytes)
    body = validate_body(TokenizeRequest, content, lenient=context.options.lenient)
    if body.model is not None:
        context.check_model(body.model)
    ready = context.engine.ready
    with Preparation(context.services, request.state.identity, [len(body.messages or "x")]):
        if body.messages is None:
            text, special = body.prompt or "", body.add_special_tokens is not False
        else:
            text = await context.render(
                Conversation(
                    messages=body.messages,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                    variables=body.chat_template_kwargs,
                    max_characters=None if ready is None else longest_text(ready.max_model_len),
                )
            )
            special = body.add_special_tokens is True
        if ready is not None:
            check_length([text], "prompt" if body.messages is None else "messages", ready.max_model_len)
        (ids,) = await context.encode([text], add_special_tokens=special)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": None if ready is None else ready.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [context.tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> dict[str, str]:
    """Return the text of token ids."""
    context = context_of(request)
    content = await read_object(request, context.options.max_body_bytes)
    body = validate_body(DetokenizeRequest, content, lenient=context.options.lenient)
    if body.model is not None:
        context.check_model(body.model)
    beyond = next((token_id for token_id in body.tokens if token_id >= context.vocab_size), None)
    if beyond is not None:
        raise InvalidRequest(
            f"tokens: {beyond} is not a token id of this model; the highest is {context.vocab_size - 1}", param="tokens"
        )
    with Preparation(context.services, request.state.identity, [max(1, len(body.tokens))]):
        # In a thread, so that the event loop can serve others meanwhile.
        return {"prompt": await asyncio.to_thread(context.tokenizer.decode, body.tokens)}
