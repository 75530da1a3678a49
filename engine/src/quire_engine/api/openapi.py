"""/openapi.json with every status and media type of each route, the key it needs, and the bounds of this server.

The page /docs shows it.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api.answer_schemas import ANSWERS, ErrorAnswer, MessageErrorAnswer, schemas
from quire_engine.api.chat import ChatCompletionRequest
from quire_engine.api.context import Context
from quire_engine.api.responses import ResponsesRequest
from quire_engine.api.schemas import NO_EFFECT, UNSUPPORTED

router = APIRouter(include_in_schema=False)

_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_YEAR = "private, max-age=31536000, immutable"


@router.get("/docs")
async def page(request: Request) -> Response:
    """Return the page, on which every route can be tried in the browser."""
    prefix: str = request.app.state.context.options.root_path
    script, style, icon = (f"{prefix}/docs/{name}" for name in _FILES)
    return get_swagger_ui_html(
        openapi_url=f"{prefix}/openapi.json",
        title="quire-engine",
        swagger_js_url=script,
        swagger_css_url=style,
        swagger_favicon_url=icon,
        swagger_ui_parameters={"tryItOutEnabled": True, "persistAuthorization": True},
    )


def _serve(name: str, media_type: str) -> None:
    @router.get(f"/docs/{name}")
    async def file() -> Response:
        return Response(_read(name), media_type=media_type, headers={"cache-control": _YEAR})


for _name, _media_type in _FILES.items():
    _serve(_name, _media_type)


@cache
def _read(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()


_JSON = "application/json"

_ERRORS = {
    400: "The request is invalid, or exceeds a limit of this model or server; the message names the field.",
    401: "The API key is missing or unknown.",
    403: "The client's host may not use this route.",
    404: "The model or the path does not exist.",
    408: "The body did not arrive in time.",
    413: "The body exceeds the size limit of this server.",
    415: "The body is not JSON, or has a content encoding.",
    429: "The queue is full, or the limit of this key is reached: see Retry-After.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The engine is starting, draining or has ended, or the request bodies need too much memory: see Retry-After.",
}
_BODY = (400, 404, 408, 413, 415)
_GENERATION = (*_BODY, 429, 503)
_ADAPTERS = (*_BODY, 503)
_EVERYWHERE = (431, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """One route. ``answer`` names a schema of ``responses``, None is text; ``others`` are statuses with that answer."""

    answer: str | None = None
    description: str = "The answer."
    media: tuple[str, ...] = (_JSON,)
    others: dict[int, str] | None = None
    errors: tuple[int, ...] = ()
    key: str | None = "apiKey"
    error: str = ErrorAnswer.__name__


_MESSAGE_ERROR = MessageErrorAnswer.__name__
_STREAM = (_JSON, "text/event-stream")
_NOT_READY = {503: "The server is not ready; the status is the reason."}
_OPERATIONS = {
    "post /v1/chat/completions": _Operation(answer="ChatCompletion", media=_STREAM, errors=_GENERATION),
    "post /v1/completions": _Operation(answer="Completion", media=_STREAM, errors=_GENERATION),
    "post /v1/messages": _Operation(answer="AnsweredMessage", media=_STREAM, errors=_GENERATION, error=_MESSAGE_ERROR),
    "post /v1/messages/count_tokens": _Operation(answer="InputTokens", errors=_GENERATION, error=_MESSAGE_ERROR),
    "post /v1/responses": _Operation(answer="ResponseObject", media=_STREAM, errors=_GENERATION),
    "post /v1/embeddings": _Operation(answer="EmbeddingList", errors=_GENERATION),
    "post /v1/rerank": _Operation(answer="Ranking", errors=_GENERATION),
    "post /v2/rerank": _Operation(answer="Ranking", errors=_GENERATION),
    "post /rerank": _Operation(answer="Ranking", errors=_GENERATION),
    "post /v1/score": _Operation(answer="ScoreList", errors=_GENERATION),
    "post /score": _Operation(answer="ScoreList", errors=_GENERATION),
    "get /v1/models": _Operation(answer="ModelList"),
    "get /v1/models/{name}": _Operation(answer="Model", errors=(404,)),
    "post /tokenize": _Operation(answer="Tokens", errors=_GENERATION),
    "post /detokenize": _Operation(answer="PromptText", errors=_GENERATION),
    "get /livez": _Operation(answer="Status", others={503: "The server must be restarted."}, key=None),
    "get /readyz": _Operation(answer="Status", others=_NOT_READY, key=None),
    "get /health": _Operation(answer="Status", others=_NOT_READY),
    "get /metrics": _Operation(media=("text/plain",), key="metricsKey"),
    "get /quire/v1/adapters": _Operation(answer="Adapters", key="metricsKey"),
    "post /v1/load_lora_adapter": _Operation(media=("text/plain",), errors=_ADAPTERS, key="adminKey"),
    "post /v1/unload_lora_adapter": _Operation(media=("text/plain",), errors=_BODY, key="adminKey"),
    "get /version": _Operation(answer="Version"),
    "post /admin/drain": _Operation(answer="Status", key="adminKey"),
    "post /admin/cache/reset": _Operation(answer="Status", errors=(503,), key="adminKey"),
}
_EVENT_DATA = {
    "ChatCompletion": "ChatCompletionChunk",
    "Completion": "Completion",
    "AnsweredMessage": "MessageEvent",
    "ResponseObject": "ResponseEvent",
}
_NAMED_EVENTS = ("MessageEvent", "ResponseEvent")
"""Events that have their type as a name, and after the last of which no [DONE] follows."""


def describe(app: FastAPI, context: Context) -> None:
    """Let ``app`` serve the document, which is created at the first request."""
    cached: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not cached:
            cached.update(_document(app, context))
        return cached

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, context: Context) -> dict[str, Any]:
    access = context.options.access
    keys = {
        "apiKey": access.api_key_file or access.api_keys,
        "adminKey": access.admin_key_file,
        "metricsKey": access.metrics_key_file,
    }
    needed_keys = {name for name, key in keys.items() if key}
    # A copy, because the routes' schemas are shared by all servers, and this document gets this server's bounds.
    document = deepcopy(
        get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            servers=app.servers or None,
        )
    )
    schemes = {key: {"type": "http", "scheme": "bearer"} for key in sorted(needed_keys)}
    document["components"] = {
        "schemas": schemas(ANSWERS),
        "securitySchemes": schemes,
    }
    for path, methods in document["paths"].items():
        for method, found in methods.items():
            operation = _OPERATIONS[f"{method} {path}"]
            needed = operation.key in needed_keys
            found["responses"] = _responses(operation, keyed=needed)
            found["security"] = [{operation.key: []}] if needed else []
            if "requestBody" in found and operation.key == "apiKey":
                _narrow(found["requestBody"]["content"][_JSON]["schema"], context)
    return document


def _responses(operation: _Operation, *, keyed: bool) -> dict[str, Any]:
    content = {media: _content(operation, media) for media in operation.media}
    made = {"200": {"description": operation.description, "content": content}}
    for status, description in (operation.others or {}).items():
        made[str(status)] = {"description": description, "content": content}
    errors = {*operation.errors, *_EVERYWHERE}
    if operation.key == "adminKey":
        errors |= {401, 403} if keyed else {403}
    elif keyed:
        errors.add(401)
    problem = {_JSON: {"schema": _reference(operation.error)}}
    for status in sorted(errors):
        made[str(status)] = {"description": _ERRORS[status], "content": problem}
    return made


def _content(operation: _Operation, media: str) -> dict[str, Any]:
    if media == _JSON:
        assert operation.answer is not None
        return {"schema": _reference(operation.answer)}
    if operation.answer in _EVENT_DATA:
        return {"schema": _event(_EVENT_DATA[operation.answer], operation.error)}
    return {"schema": {"type": "string"}}


def _event(data: str, error: str) -> dict[str, Any]:
    """Return the schema of a server-sent event in the form that tools for streams read."""
    is_named = data in _NAMED_EVENTS
    end = "" if is_named else "; at the end [DONE]"
    name: dict[str, Any] = {"type": "string"} if is_named else {"enum": ["message", "error"]}
    return {
        "type": "object",
        "description": f"data is a {data} in JSON{end}; in an event named error it is an {error}.",
        "properties": {"data": {"type": "string"}, "event": name},
        "required": ["data"],
    }


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _name_models(schema: dict[str, Any], context: Context) -> None:
    """Write the model names into a request's schema, unless adapters come and go."""
    name: dict[str, Any] = {"type": "string"}
    if context.adapters is None:
        name["enum"] = list(context.model_names)
    schema["properties"]["model"] = (
        name if "model" in schema.get("required", ()) else {"anyOf": [name, {"type": "null"}]}
    )


def _narrow(schema: dict[str, Any], context: Context) -> None:
    """Write this server's bounds into a request's schema: the model names, the vocabulary's size, the limits."""
    fields = schema["properties"]
    _name_models(schema, context)
    _narrow_token_ids(fields, context.vocab_size - 1)
    if "priority" in fields and not context.priorities:
        for form in fields["priority"].get("anyOf", [fields["priority"]]):
            if form.get("type") == "integer":
                form.update(minimum=0, maximum=0)
    if "stream" not in fields:
        return
    if "top_logprobs" not in fields and "logprobs" not in fields:
        schema["allOf"] = [*_RULES]
        return
    logprobs = "top_logprobs" if "top_logprobs" in fields else "logprobs"
    for form in fields[logprobs]["anyOf"]:
        if form.get("type") == "integer":
            form["maximum"] = context.options.max_logprobs
    if schema["title"] == ResponsesRequest.__name__:
        schema["allOf"] = [*_RULES]
        return
    is_chat = schema["title"] == ChatCompletionRequest.__name__
    schema["allOf"] = [*_RULES, *(_CHAT_RULES if is_chat else ())]
    for field, (harmless, reason) in UNSUPPORTED.items():
        permitted = {"enum": [*NO_EFFECT, *harmless], "description": f"Only values without an effect: {reason}"}
        fields.setdefault(field, permitted)


def _narrow_token_ids(fields: dict[str, Any], highest: int) -> None:
    for field in ("stop_token_ids", "allowed_token_ids", "tokens"):
        for form in fields.get(field, {}).get("anyOf", [fields.get(field, {})]):
            if "items" in form:
                form["items"] = {"type": "integer", "minimum": 0, "maximum": highest}


def _needs(field: str, present: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": [field], "properties": {field: present}}, "then": then}


def _is(field: str, value: Any) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"const": value}}}


_RULES = (_needs("stream_options", {"type": "object"}, _is("stream", True)),)
_CHAT_RULES = (
    _needs("top_logprobs", {"type": "integer", "minimum": 1}, _is("logprobs", True)),
    _needs("continue_final_message", {"const": True}, _is("add_generation_prompt", False)),
)
