"""/openapi.json, so that it is true: every status and media type a route answers with, its key, this server's bounds.

FastAPI finds the routes and the request bodies; what they answer is in ``_OPERATIONS`` here, since routes write their
answers themselves. Tests hold the document against a running server.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from quire_engine.server.context import Context
from quire_engine.server.openai import answers
from quire_engine.server.openai.answers import ErrorAnswer
from quire_engine.server.openai.later import LATER, NOTHING
from quire_engine.server.openai.schemas import ChatCompletionRequest

_JSON = "application/json"

_ERRORS = {
    400: "The request is wrong, or more than this model and this server take; the message says where.",
    401: "The key is missing or not known.",
    403: "Not from here.",
    404: "There is no such model or path.",
    408: "The body did not arrive in time.",
    413: "The body is larger than this server takes.",
    415: "The body is not JSON, or encoded.",
    429: "Too much waits already, or this key's limit is reached: see Retry-After.",
    431: "The headers are too large.",
    500: "The server failed.",
    503: "The engine starts, drains or ended: see Retry-After.",
}
_BODY = (400, 404, 408, 413, 415)
_GENERATION = (*_BODY, 429, 503)
_EVERYWHERE = (431, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operation:
    """``answer`` names one of ``answers.ANSWERS`` or is plain text; ``others`` are statuses with the same answer."""

    answer: str | None = None
    description: str = "The answer."
    media: tuple[str, ...] = (_JSON,)
    others: dict[int, str] | None = None
    errors: tuple[int, ...] = ()
    key: str | None = "apiKey"


_STREAM = (_JSON, "text/event-stream")
_NOT_READY = {503: "Not now: the status says why."}
_OPERATIONS = {
    "post /v1/chat/completions": _Operation(answer="ChatCompletion", media=_STREAM, errors=_GENERATION),
    "post /v1/completions": _Operation(answer="Completion", media=_STREAM, errors=_GENERATION),
    "get /v1/models": _Operation(answer="ModelList"),
    "get /v1/models/{name}": _Operation(answer="Model", errors=(404,)),
    "post /tokenize": _Operation(answer="Tokens", errors=_BODY),
    "post /detokenize": _Operation(answer="PromptText", errors=_BODY),
    "get /livez": _Operation(answer="Status", others={503: "It wants to be restarted."}, key=None),
    "get /readyz": _Operation(answer="Status", others=_NOT_READY, key=None),
    "get /health": _Operation(answer="Status", others=_NOT_READY),
    "get /metrics": _Operation(media=("text/plain",), key="metricsKey"),
    "get /version": _Operation(answer="Version"),
    "post /admin/drain": _Operation(answer="Status", key="adminKey"),
    "post /admin/cache/reset": _Operation(answer="Status", errors=(503,), key="adminKey"),
}
_EVENT_DATA = {"ChatCompletion": "ChatCompletionChunk", "Completion": "Completion"}


def describe(app: FastAPI, context: Context) -> None:
    """Let ``app`` answer with the document."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app, context))
        return made

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, context: Context) -> dict[str, Any]:
    access = context.options.access
    files = {"apiKey": access.api_key_file, "adminKey": access.admin_key_file, "metricsKey": access.metrics_key_file}
    needed_keys = {key for key, file in files.items() if file is not None}
    # A copy: the routes' schemas, which are every server's, are made this server's below.
    document = deepcopy(
        get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    )
    schemes = {key: {"type": "http", "scheme": "bearer"} for key in sorted(needed_keys)}
    document["components"] = {"schemas": answers.schemas(), "securitySchemes": schemes}
    for path, methods in document["paths"].items():
        for method, found in methods.items():
            operation = _OPERATIONS[f"{method} {path}"]
            needed = operation.key in needed_keys
            found["responses"] = _responses(operation, keyed=needed)
            found["security"] = [{operation.key: []}] if needed else []
            if "requestBody" in found:
                _narrow(found["requestBody"]["content"][_JSON]["schema"], context)
    return document


def _responses(operation: _Operation, *, keyed: bool) -> dict[str, Any]:
    content = {media: _content(operation, media) for media in operation.media}
    made = {"200": {"description": operation.description, "content": content}}
    for status, description in (operation.others or {}).items():
        made[str(status)] = {"description": description, "content": content}
    errors = {*operation.errors, *_EVERYWHERE}
    if operation.key == "adminKey":
        errors.add(401 if keyed else 403)
    elif keyed:
        errors.add(401)
    problem = {_JSON: {"schema": _reference(ErrorAnswer.__name__)}}
    for status in sorted(errors):
        made[str(status)] = {"description": _ERRORS[status], "content": problem}
    return made


def _content(operation: _Operation, media: str) -> dict[str, Any]:
    if media == _JSON:
        assert operation.answer is not None
        return {"schema": _reference(operation.answer)}
    if operation.answer in _EVENT_DATA:
        return {"schema": _event(_EVENT_DATA[operation.answer])}
    return {"schema": {"type": "string"}}


def _event(data: str) -> dict[str, Any]:
    """One server-sent event, as tools that know streams read a schema of theirs."""
    return {
        "type": "object",
        "description": f"data is a {data} in JSON; at the end [DONE]; in an event named error it is an ErrorAnswer.",
        "properties": {"data": {"type": "string"}, "event": {"enum": ["message", "error"]}},
        "required": ["data"],
    }


def _reference(schema: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{schema}"}


def _narrow(schema: dict[str, Any], context: Context) -> None:
    """Write into a request's schema what it depends on here: names of models, size of the vocabulary, limits."""
    fields = schema["properties"]
    name = {"type": "string", "enum": list(context.model_names)}
    fields["model"] = name if "model" in schema.get("required", ()) else {"anyOf": [name, {"type": "null"}]}
    highest = context.vocab_size - 1
    for field in ("stop_token_ids", "allowed_token_ids", "tokens"):
        for form in fields.get(field, {}).get("anyOf", [fields.get(field, {})]):
            if "items" in form:
                form["items"] = {"type": "integer", "minimum": 0, "maximum": highest}
    if "stream" not in fields:
        return
    if not context.priorities:
        fields["priority"] = {**fields["priority"], "minimum": 0, "maximum": 0}
    logprobs = "top_logprobs" if "top_logprobs" in fields else "logprobs"
    for form in fields[logprobs]["anyOf"]:
        if form.get("type") == "integer":
            form["maximum"] = context.options.max_logprobs
    is_chat = schema["title"] == ChatCompletionRequest.__name__
    schema["allOf"] = [*_RULES, *(_CHAT_RULES if is_chat else ())]
    for field, (harmless, reason) in LATER.items():
        fields.setdefault(field, {"enum": [*NOTHING, *harmless], "description": f"Taken without effect only: {reason}"})


def _needs(field: str, present: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    return {"if": {"required": [field], "properties": {field: present}}, "then": then}


def _is(field: str, value: Any) -> dict[str, Any]:
    return {"required": [field], "properties": {field: {"const": value}}}


_RULES = (_needs("stream_options", {"type": "object"}, _is("stream", True)),)
_CHAT_RULES = (
    _needs("top_logprobs", {"type": "integer"}, _is("logprobs", True)),
    _needs("continue_final_message", {"const": True}, _is("add_generation_prompt", False)),
)
