"""The route POST /v1/responses. No response is stored: a client sends the whole conversation with each request."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.errors import InvalidRequest
from quire_engine.server.context import Context, context_of
from quire_engine.server.generation.streaming import respond
from quire_engine.server.http.body import body_schema, validate_body
from quire_engine.server.openai.answer_blocks import AnswerBlocks
from quire_engine.server.openai.chat_generation import start_chat
from quire_engine.server.openai.chat_schemas import ChatCompletionRequest
from quire_engine.server.openai.logprobs import chat_logprobs
from quire_engine.server.openai.requests import read_request
from quire_engine.server.responses.conversion import chat_fields
from quire_engine.server.responses.schemas import UNSUPPORTED, ResponsesRequest
from quire_engine.server.responses.writer import ResponseWriter, response_head

router = APIRouter()


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer a list of items, streamed or in one piece."""
    context = context_of(request)
    arrived = context.now()
    with context.bodies.lease() as held:
        body = await read_request(request, context, ResponsesRequest, held, unsupported=UNSUPPORTED)
        _check_logprobs(context, body)
        chat = validate_body(ChatCompletionRequest, chat_fields(body), lenient=False)
        generation, plan = await start_chat(request, context, chat, arrived, param="input")
    head = response_head(context.answer_name(body.model), body, defaults=dict(context.sampling_defaults.params))
    top = body.top_logprobs or 0
    writer = ResponseWriter(
        head,
        generation.choices,
        AnswerBlocks(plan, context.tokenizer),
        lambda sampled: chat_logprobs(context.tokenizer, sampled, top)["content"],
    )
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=body.stream or False, keepalive_seconds=keepalive)


def _check_logprobs(context: Context, body: ResponsesRequest) -> None:
    """Raise InvalidRequest for logprobs of an answer of several items: which tokens are its text is not known."""
    if body.includes_logprobs and (body.tools or context.formats.reasoning is not None):
        what = "a model that reasons" if context.formats.reasoning is not None else "tools"
        raise InvalidRequest(
            f"include: logprobs are not supported with {what}; POST /v1/chat/completions has them", param="include"
        )
