"""The routes POST /v1/messages and /v1/messages/count_tokens in Anthropic's form."""

from typing import TypeVar

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.server.anthropic.conversion import chat_fields
from quire_engine.server.anthropic.schemas import UNSUPPORTED, CountTokensRequest, MessagesRequest
from quire_engine.server.anthropic.writer import MessageWriter
from quire_engine.server.context import Context, context_of
from quire_engine.server.generation.generation import Preparation
from quire_engine.server.generation.streaming import respond
from quire_engine.server.http.body import body_schema, validate_body
from quire_engine.server.http.body_budget import BodyLease
from quire_engine.server.openai.answer_blocks import AnswerBlocks
from quire_engine.server.openai.answer_parts import reasoning_tags
from quire_engine.server.openai.chat_generation import check_tools, conversation_of, start_chat
from quire_engine.server.openai.chat_schemas import ChatCompletionRequest
from quire_engine.server.openai.requests import read_request

router = APIRouter()

_Body = TypeVar("_Body", bound=CountTokensRequest)


@router.post("/v1/messages", openapi_extra=body_schema(MessagesRequest))
async def messages(request: Request) -> Response:
    """Answer a conversation, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    with context.bodies.lease() as held:
        chat = await _read(request, context, MessagesRequest, held)
        generation, plan = await start_chat(request, context, chat, arrived)
    writer = MessageWriter(
        id=f"msg_{request.state.request_id}",
        model=context.answer_name(chat.model),
        choices=generation.choices,
        blocks=AnswerBlocks(plan, context.tokenizer),
    )
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=chat.stream or False, keepalive_seconds=keepalive)


@router.post("/v1/messages/count_tokens", openapi_extra=body_schema(CountTokensRequest))
async def count_tokens(request: Request) -> Response:
    """Return the number of tokens of a conversation as the model sees it."""
    context = context_of(request)
    with context.bodies.lease() as held:
        chat = await _read(request, context, CountTokensRequest, held)
        check_tools(context, chat)
        with Preparation(context.services, request.state.identity, [len(chat.messages)]):
            text = await context.render(conversation_of(context, chat, chat.messages))
            (ids,) = await context.encode([text], add_special_tokens=chat.add_special_tokens)
    return Response(msgspec.json.encode({"input_tokens": len(ids)}), media_type="application/json")


async def _read(request: Request, context: Context, schema: type[_Body], held: BodyLease) -> ChatCompletionRequest:
    body = await read_request(request, context, schema, held, unsupported=UNSUPPORTED)
    fields = chat_fields(body)
    if reasoning_tags(context.formats, context.tokenizer) is None:
        # Clients send a budget to every model; one whose reasoning cannot be counted answers without.
        fields.pop("thinking_token_budget", None)
    return validate_body(ChatCompletionRequest, fields, lenient=False)
