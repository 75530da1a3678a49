"""The routes below /v1/responses: create a response, and get, cancel and delete one that is kept."""

import asyncio
import logging
from dataclasses import replace

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire_common.response_ids import REPLICA_TAG_HEADER, new_response_id
from quire_engine.errors import InternalError, InvalidRequest, RequestError
from quire_engine.server.context import Context, context_of
from quire_engine.server.generation.generation import ClientGone, Generation
from quire_engine.server.generation.streaming import collect_whole, respond
from quire_engine.server.http.body import body_schema, validate_body
from quire_engine.server.openai.answer_blocks import AnswerBlocks
from quire_engine.server.openai.chat_generation import start_chat
from quire_engine.server.openai.chat_schemas import ChatCompletionRequest
from quire_engine.server.openai.logprobs import chat_logprobs
from quire_engine.server.openai.requests import read_request
from quire_engine.server.responses.conversion import answer_messages, chat_fields, input_messages
from quire_engine.server.responses.schemas import UNSUPPORTED, ResponsesRequest
from quire_engine.server.responses.store import ResponseStore, StoredResponse
from quire_engine.server.responses.writer import ResponseHead, ResponseWriter, response_head

router = APIRouter()
_log = logging.getLogger(__name__)
_encode = msgspec.json.encode
_JSON = "application/json"


def _store_of(request: Request) -> ResponseStore:
    store: ResponseStore = request.app.state.responses
    return store


@router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest))
async def create_response(request: Request) -> Response:
    """Answer a list of items, streamed, in one piece or in the background."""
    context, store = context_of(request), _store_of(request)
    arrived = context.now()
    tenant = request.state.identity.tenant
    with context.bodies.lease() as held:
        body = await read_request(request, context, ResponsesRequest, held, unsupported=UNSUPPORTED)
        keeps = body.store is not False and store.enabled
        if body.background and not keeps:
            raise InvalidRequest(
                "background: this server keeps no responses (--response-store-memory 0)", param="background"
            )
        earlier = [] if body.previous_response_id is None else store.conversation(body.previous_response_id, tenant)
        _check_logprobs(context, body)
        fields = chat_fields(body, earlier)
        # The instructions are not part of the conversation, as in OpenAI's API.
        conversation = [*earlier, *input_messages(body.input)] if keeps else []
        chat = validate_body(ChatCompletionRequest, fields, lenient=False)
        generation, plan = await start_chat(request, context, chat, arrived, param="input")
    head = response_head(
        new_response_id(request.headers.get(REPLICA_TAG_HEADER)),
        context.answer_name(body.model),
        body,
        store=keeps,
        defaults=dict(context.sampling_defaults.params),
    )
    kept = StoredResponse(id=head.id, tenant=tenant, body=b"")

    def keep(finished: bytes, blocks: AnswerBlocks) -> None:
        if keeps:
            messages = _encode([*conversation, *answer_messages(blocks.blocks)])
            store.finish(replace(kept, body=finished, messages=messages), is_new=not body.background)

    top = body.top_logprobs or 0
    writer = ResponseWriter(
        head,
        generation.choices,
        AnswerBlocks(plan, context.tokenizer),
        keep,
        lambda sampled: chat_logprobs(context.tokenizer, sampled, top)["content"],
    )
    if body.background:
        return _begin_background(request, store, kept, head, generation, writer)
    keepalive = context.options.sse_keepalive_seconds
    return await respond(request, generation, writer, stream=body.stream or False, keepalive_seconds=keepalive)


def _check_logprobs(context: Context, body: ResponsesRequest) -> None:
    """Raise InvalidRequest for logprobs of an answer of several items: which tokens are its text is not known."""
    if body.includes_logprobs and (body.tools or context.formats.reasoning is not None):
        what = "a model that reasons" if context.formats.reasoning is not None else "tools"
        raise InvalidRequest(
            f"include: logprobs are not supported with {what}; POST /v1/chat/completions has them", param="include"
        )


def _begin_background(
    request: Request,
    store: ResponseStore,
    kept: StoredResponse,
    head: ResponseHead,
    generation: Generation,
    writer: ResponseWriter,
) -> Response:
    loop = asyncio.get_running_loop()

    def cancel() -> None:
        # The answer that displaces this one from the store may be encoded in another thread.
        loop.call_soon_threadsafe(generation.abandon)

    started = replace(kept, body=_encode(head.response("in_progress")), cancel=cancel)
    if not store.put(started):
        generation.close()
        raise InvalidRequest(
            f"background: the response takes {started.num_bytes} bytes, more than this server keeps of all responses "
            "(--response-store-memory)",
            param="background",
        )
    running: set[asyncio.Task[None]] = request.app.state.background_responses
    task = asyncio.create_task(_run_background(store, started, head, generation, writer))
    running.add(task)
    task.add_done_callback(running.discard)
    return Response(started.body, media_type=_JSON, headers=request.state.answer_headers)


async def _run_background(
    store: ResponseStore, started: StoredResponse, head: ResponseHead, generation: Generation, writer: ResponseWriter
) -> None:
    try:
        # The writer stores the finished response.
        await collect_whole(generation, writer, await generation.first())
    except ClientGone:
        store.finish(replace(started, body=_encode(head.response("cancelled")), cancel=None))
    except RequestError as error:
        store.finish(replace(started, body=_encode(writer.failure(error)), cancel=None))
    except Exception:
        _log.exception("background response failed: internal error")
        internal = InternalError("internal server error; the server's log has the details")
        store.finish(replace(started, body=_encode(writer.failure(internal)), cancel=None))
    finally:
        generation.close()


@router.get("/v1/responses/{id}")
async def get_response(request: Request, id: str) -> Response:
    """Return a response that is kept."""
    if request.query_params.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest("stream: a response that is kept cannot be streamed", param="stream")
    found = _store_of(request).get(id, request.state.identity.tenant)
    return Response(found.body, media_type=_JSON)


@router.post("/v1/responses/{id}/cancel")
async def cancel_response(request: Request, id: str) -> Response:
    """Cancel a background response that is not finished."""
    store = _store_of(request)
    found = store.get(id, request.state.identity.tenant)
    if found.cancel is None:
        status = msgspec.json.decode(found.body)["status"]
        if status != "cancelled":
            raise InvalidRequest(
                f"the response is {status}; only a background response that is not finished can be cancelled",
                code="response_not_cancellable",
            )
        return Response(found.body, media_type=_JSON)
    cancelled = {**msgspec.json.decode(found.body), "status": "cancelled"}
    found.cancel()
    ended = store.finish(replace(found, body=_encode(cancelled), cancel=None))
    return Response(ended.body, media_type=_JSON)


@router.delete("/v1/responses/{id}")
async def delete_response(request: Request, id: str) -> Response:
    """Delete a response; one that is not finished is cancelled."""
    _store_of(request).delete(id, request.state.identity.tenant)
    return Response(_encode({"id": id, "object": "response", "deleted": True}), media_type=_JSON)
