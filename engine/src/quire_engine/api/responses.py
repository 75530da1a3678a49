"""The route POST /v1/responses. No response is stored: a client sends the whole conversation with each request."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

import msgspec
from fastapi import APIRouter
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from starlette.requests import Request
from starlette.responses import Response

from quire_common.contract.engine import NO_STORED_RESPONSES
from quire_engine.api.answer_blocks import (
    AnswerBlocks,
    Block,
    Change,
    Closed,
    Grown,
    Opened,
)
from quire_engine.api.body import STRING_OR_OBJECTS, body_schema, known_type, one_or_list, validate_body
from quire_engine.api.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Arguments,
    ChatCompletionRequest,
    SamplingExtensions,
    start_chat,
)
from quire_engine.api.context import Context, context_of
from quire_engine.api.logprobs import chat_logprobs
from quire_engine.api.output import Choice, Delta
from quire_engine.api.request import read_request
from quire_engine.api.schemas import Stop, StreamOptions, Strict, Unsupported
from quire_engine.api.stream import UsageReport, respond
from quire_engine.core.batch import TokenLogprobs
from quire_engine.errors import InvalidRequest, RequestError

_UNSUPPORTED = "is not supported by this version"
UNSUPPORTED: Unsupported = {
    "background": ((), f"is not supported, because {NO_STORED_RESPONSES}"),
    "conversation": ((), f"is not supported, because {NO_STORED_RESPONSES}"),
    "previous_response_id": ((), f"is not supported, because {NO_STORED_RESPONSES}"),
    "prompt": ((), f"a stored prompt {_UNSUPPORTED}"),
    "context_management": ((), _UNSUPPORTED),
    "moderation": ((), _UNSUPPORTED),
    "image": ((), _UNSUPPORTED),
    "access_programs": ((), _UNSUPPORTED),
    "truncation": (("disabled",), 'only "disabled" is supported by this version'),
}

_LOGPROBS = "message.output_text.logprobs"
_HARMLESS_INCLUDES = (
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
)
"""Parts of a response that this server never has, so that including them changes nothing."""


class _Part(Strict):
    """A part of an item. Further fields have no effect, because clients send back whole answers."""

    model_config = ConfigDict(extra="ignore")


class TextPart(_Part):
    """A text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class RefusalPart(_Part):
    """A refusal of an earlier answer, which the model sees as its text."""

    type: Literal["refusal"]
    refusal: str


_MESSAGE_PARTS = ("input_text", "output_text", "text", "refusal")
ContentPart = Annotated[TextPart | RefusalPart, known_type(*_MESSAGE_PARTS)]
Content = Annotated[
    list[ContentPart], one_or_list(lambda text: {"type": "input_text", "text": text}, "parts"), STRING_OR_OBJECTS
]
_ReasoningPart = Annotated[TextPart, known_type("reasoning_text", "summary_text")]


class MessageItem(_Part):
    """A message; its type may be missing."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class ReasoningItem(_Part):
    """The reasoning of an earlier answer. ``encrypted_content`` has no effect."""

    type: Literal["reasoning"]
    summary: list[_ReasoningPart] | None = None
    content: list[_ReasoningPart] | None = None


class FunctionCallItem(_Part):
    """A function call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Annotated[str, Field(max_length=256)]
    name: str
    arguments: Arguments


class FunctionCallOutputItem(_Part):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: Annotated[str, Field(max_length=256)]
    output: Content


_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
Item = Annotated[
    Annotated[
        MessageItem | ReasoningItem | FunctionCallItem | FunctionCallOutputItem,
        Field(discriminator="type"),
    ],
    known_type(*_ITEMS, of_role="message"),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {"type": {"enum": list(_ITEMS)}, "role": {"type": "string"}},
            "anyOf": [{"required": ["type"]}, {"required": ["role"]}],
        }
    ),
]
Items = Annotated[
    Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES)],
    one_or_list(lambda text: {"type": "message", "role": "user", "content": text}, "items"),
    STRING_OR_OBJECTS,
]


class FunctionTool(_Part):
    """A function that the model may call. A schema is always enforced where ``tool_choice`` demands a call."""

    type: Literal["function"]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tools = Annotated[list[Annotated[FunctionTool, known_type("function")]], Field(max_length=MAX_TOOLS)]


def _check_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("name"), str):
        raise ValueError('should be "none", "auto", "required" or {"type": "function", "name": "…"}')
    return value


_named_choice = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
ToolChoice = Annotated[
    SkipValidation[str | dict[str, Any]],
    BeforeValidator(_check_choice),
    WithJsonSchema({"anyOf": [{"type": "string", "enum": ["none", "auto", "required"]}, _named_choice]}),
]


class TextFormat(Strict):
    """The form of the answer. A schema is enforced, whatever ``strict`` says."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema: is required for the type json_schema")
        return self


class TextOptions(Strict):
    """Options of the answer's text."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Strict):
    """The effort of the model's reasoning. Answers have the reasoning itself, never a summary of it."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(SamplingExtensions):
    """The body of POST /v1/responses."""

    model: str | None = None
    input: Items
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    stop: Stop | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    include: list[str] | None = Field(None, description=f"{_LOGPROBS} reports the logprobs of the text.")
    top_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description=f"Report this number of likeliest tokens with each token. Needs {_LOGPROBS} in include."
    )
    metadata: Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None

    # Accepted, because they change nothing in an answer.
    store: bool | None = Field(None, description="This server stores no responses.")
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    max_tool_calls: int | None = Field(None, description="Of tools that run on the server; this one runs no tools.")

    @property
    def includes_logprobs(self) -> bool:
        """True if the answer has logprobs."""
        return _LOGPROBS in (self.include or ())

    @field_validator("include")
    @classmethod
    def _known_includes(cls, value: list[str] | None) -> list[str] | None:
        unknown = next((each for each in value or () if each not in (*_HARMLESS_INCLUDES, _LOGPROBS)), None)
        if unknown is not None:
            raise ValueError(f"{unknown[:60]!r} {_UNSUPPORTED}")
        return value

    @model_validator(mode="after")
    def _supported_together(self) -> Self:
        if self.top_logprobs and not self.includes_logprobs:
            raise ValueError(f"top_logprobs: needs {_LOGPROBS} in include")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only allowed with stream set to true")
        return self


Messages = list[dict[str, Any]]


def chat_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of the chat request, of which the chat's schema may refuse more."""
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat: dict[str, Any] = {
        "messages": [*instructions, *_input_messages(body.input)],
        "model": body.model,
        "max_completion_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop,
        "parallel_tool_calls": body.parallel_tool_calls,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        **body.extensions(),
    }
    if body.includes_logprobs:
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.tools:
        chat["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    if isinstance(body.tool_choice, dict):
        chat["tool_choice"] = {"type": "function", "function": {"name": body.tool_choice["name"]}}
    else:
        chat["tool_choice"] = body.tool_choice
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    return {name: value for name, value in chat.items() if value is not None}


def _response_format(wanted: TextFormat) -> dict[str, Any]:
    if wanted.type != "json_schema":
        return {"type": wanted.type}
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "answer", "schema": wanted.schema_}}


def _input_messages(items: Sequence[Item]) -> Messages:
    """Return the messages of a request's input. Reasoning, text and calls of one answer become one message."""
    messages: Messages = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _add_to_answer(messages, "content", _joined(item.content))
            case MessageItem():
                messages.append({"role": item.role, "content": _joined(item.content)})
            case ReasoningItem():
                text = "".join(part.text for part in item.content or item.summary or ())
                _add_to_answer(messages, "reasoning_content", text)
            case FunctionCallItem():
                _add_call(messages, item.call_id, item.name, item.arguments)
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _joined(item.output)})
    return messages


_ORDER = ("reasoning_content", "content", "tool_calls")
"""The order of an answer's parts: what comes before the parts that a message has begins the next message."""


def _answer(messages: Messages, part: str) -> dict[str, Any]:
    """Return the message of the assistant that the part belongs to, which is new where the last one is complete."""
    last = messages[-1] if messages else {"role": "none"}
    later = _ORDER[_ORDER.index(part) + (part == "tool_calls") :]
    if last["role"] == "assistant" and not any(last.get(each) for each in later):
        return last
    messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_to_answer(messages: Messages, part: str, text: str) -> None:
    _answer(messages, part)[part] = text


def _add_call(messages: Messages, call_id: str, name: str, arguments: str) -> None:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _answer(messages, "tool_calls").setdefault("tool_calls", []).append(call)


def _joined(content: Sequence[ContentPart]) -> str:
    return "\n".join(part.refusal if isinstance(part, RefusalPart) else part.text for part in content)


_encode = msgspec.json.Encoder(decimal_format="number").encode
_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_ECHOED = (
    *("instructions", "max_output_tokens", "max_tool_calls"),
    *("prompt_cache_key", "safety_identifier", "user"),
)
"""Fields of the request that the response repeats; null where the request has none."""
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """The fields of a response that do not depend on its answer."""

    id: str
    model: str
    created_at: int
    fields: dict[str, Any]

    def response(self, status: str, **more: Any) -> dict[str, Any]:
        """Return the response object. Its usage is its last field, which the gateway reads."""
        made: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "model": self.model,
            **self.fields,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "completed_at": None,
            "usage": None,
            **more,
        }
        made["usage"] = made.pop("usage")
        return made


def response_head(model: str, body: ResponsesRequest, *, defaults: dict[str, float]) -> ResponseHead:
    """Return the fields of a response that its request decides; ``defaults`` are the model's sampling parameters."""
    given = body.model_dump(
        include={*_ECHOED, "metadata", "reasoning", "text", "tool_choice", "tools"}, by_alias=True, exclude_none=True
    )
    reasoning = {"effort": None, "summary": None, **given.get("reasoning", {})}
    text = {"format": {"type": "text"}, **given.get("text", {})}
    fields = {
        **dict.fromkeys(_ECHOED),
        **given,
        "background": False,
        "metadata": given.get("metadata", {}),
        "previous_response_id": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": reasoning,
        "service_tier": "default",
        "store": False,
        "temperature": body.temperature if body.temperature is not None else defaults.get("temperature", 1.0),
        "text": text,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools", []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p if body.top_p is not None else defaults.get("top_p", 1.0),
        "truncation": "disabled",
    }
    return ResponseHead(id=f"resp_{secrets.token_hex(24)}", model=model, created_at=int(time.time()), fields=fields)


class ResponseWriter:
    """A writer of the one answer to a request."""

    def __init__(
        self,
        head: ResponseHead,
        choices: list[Choice],
        blocks: AnswerBlocks,
        written: Callable[[Sequence[TokenLogprobs]], list[dict[str, Any]]],
    ) -> None:
        """Create a writer; ``written`` gives logprobs the form of OpenAI's API."""
        self._written = written
        self._logprobs: list[dict[str, Any]] = []
        """The logprobs of the text so far."""
        self._new_logprobs: list[dict[str, Any]] = []
        self._head = head
        self._blocks = blocks
        self._report = UsageReport(choices, 1, None)
        self._ids: list[str] = []
        self._sequence_number = 0
        self._cut = False

    # --- streams ---

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta."""
        events = [] if self._sequence_number else self._start()
        self._cut = delta.finish_reason == "length"
        self._add_logprobs(delta)
        for change in self._blocks.feed(delta):
            events += [self._event(type, **fields) for type, fields in self._changes(change)]
        return b"".join(events)

    def _add_logprobs(self, delta: Delta) -> None:
        self._new_logprobs = self._written(delta.logprobs)
        self._logprobs += self._new_logprobs

    def _start(self) -> list[bytes]:
        response = self._head.response("in_progress")
        return [self._event(type, response=response) for type in ("response.created", "response.in_progress")]

    def _event(self, type: str, **fields: Any) -> bytes:
        data = _encode({"type": type, "sequence_number": self._sequence_number, **fields})
        self._sequence_number += 1
        return b"event: %b\ndata: %b\n\n" % (type.encode(), data)

    def _changes(self, change: Change) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of a change: their types and fields."""
        block = change.block
        if isinstance(change, Opened):
            self._ids.append(_PREFIXES[block.kind] + secrets.token_hex(24))
        place = {"item_id": self._ids[block.number], "output_index": block.number}
        part = {**place, "content_index": 0}
        kind = {"reasoning": "response.reasoning_text", "text": "response.output_text"}.get(block.kind, "")
        extra: dict[str, Any] = {"logprobs": self._new_logprobs} if block.kind == "text" else {}
        match change:
            case Opened():
                opened = {"output_index": block.number, "item": self._item(block, "in_progress")}
                events = [("response.output_item.added", opened)]
                if kind:
                    events.append(("response.content_part.added", {**part, "part": _part(block, "", [])}))
            case Grown(_, text):
                if kind:
                    return [(f"{kind}.delta", {**part, "delta": text, **extra})]
                return [("response.function_call_arguments.delta", {**place, "delta": text})]
            case Closed():
                text = block.text
                if kind:
                    extra = {"logprobs": self._logprobs} if block.kind == "text" else {}
                    events = [
                        (f"{kind}.done", {**part, "text": text, **extra}),
                        ("response.content_part.done", {**part, "part": _part(block, text, self._logprobs)}),
                    ]
                else:
                    done = {**place, "name": block.name, "arguments": text}
                    events = [("response.function_call_arguments.done", done)]
                item = self._item(block, self._status(block))
                events.append(("response.output_item.done", {"output_index": block.number, "item": item}))
        return events

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, in the form of chat completions, which the gateway reads."""
        return self._report.usage()

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def failed(self, error: RequestError) -> bytes:
        """Return the last events of a stream that failed."""
        code = _ERROR_CODES.get(error.status, "server_error")
        response = self._head.response("failed", error={"code": code, "message": error.message})
        event = self._event("response.failed", response=response)
        return event + self._event("error", code=error.code, message=error.message, param=error.param)

    # --- whole answers ---

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        (answer,) = answers
        self._cut = answer.finish_reason == "length"
        self._add_logprobs(answer)
        self._blocks.feed(answer)
        self._ids = [_PREFIXES[block.kind] + secrets.token_hex(24) for block in self._blocks.blocks]
        return _encode(self._finished())

    def _finished(self) -> dict[str, Any]:
        status = "incomplete" if self._cut else "completed"
        return self._head.response(
            status,
            incomplete_details={"reason": "max_output_tokens"} if self._cut else None,
            output=[self._item(block, self._status(block)) for block in self._blocks.blocks],
            completed_at=None if self._cut else int(time.time()),
            usage=self._usage(),
        )

    def _usage(self) -> dict[str, Any]:
        counts = self._report.usage()
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._blocks.reasoning_tokens or 0},
            "total_tokens": counts["total_tokens"],
        }

    def _status(self, block: Block) -> str:
        """Return the status of a block that is closed: a limit cuts the last one."""
        return "incomplete" if self._cut and block is self._blocks.blocks[-1] else "completed"

    def _item(self, block: Block, status: str) -> dict[str, Any]:
        head = {"id": self._ids[block.number], "status": status}
        text = "" if status == "in_progress" else block.text
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {**head, "type": "function_call", **call}
        content = [] if status == "in_progress" else [_part(block, text, self._logprobs)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}


def _part(block: Block, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


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
