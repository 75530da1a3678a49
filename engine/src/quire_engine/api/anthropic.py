"""The routes POST /v1/messages and /v1/messages/count_tokens in Anthropic's form, over the chat that means the same."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, TypeVar

import msgspec
from fastapi import APIRouter
from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from starlette.requests import Request
from starlette.responses import Response

from quire_engine.api.answer_blocks import (
    AnswerBlocks,
    Block,
    Change,
    Closed,
    Grown,
    Opened,
    reasoning_tags,
)
from quire_engine.api.body import STRING_OR_OBJECTS, BodyLease, body_schema, known_type, one_or_list, validate_body
from quire_engine.api.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    SamplingExtensions,
    check_tools,
    conversation_of,
    start_chat,
)
from quire_engine.api.context import Context, context_of
from quire_engine.api.generation import Preparation
from quire_engine.api.output import Choice, Delta
from quire_engine.api.problems import error_body
from quire_engine.api.request import read_request
from quire_engine.api.schemas import (
    MAX_FIELDS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Strict,
)
from quire_engine.api.stream import UsageReport, respond
from quire_engine.errors import RequestError

_UNSUPPORTED = "is not supported by this version"
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), f"code execution {_UNSUPPORTED}"),
    "context_management": ((), _UNSUPPORTED),
    "diagnostics": ((), _UNSUPPORTED),
    "fallbacks": ((), _UNSUPPORTED),
    "mcp_servers": ((), f"MCP {_UNSUPPORTED}"),
    "speed": (("standard",), _UNSUPPORTED),
}
"""Fields with the values that have no effect, and the reason to refuse all others."""


class _Block(Strict):
    """A block of a message. Further fields, such as ``cache_control`` and ``citations``, have no effect."""

    model_config = ConfigDict(extra="ignore")


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(_Block):
    """The reasoning of an earlier answer. Its signature is not checked."""

    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(_Block):
    """Encrypted reasoning of another server, which the model does not see."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(_Block):
    """A tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=256)]
    name: str
    input: dict[str, Any]


_Text = Annotated[TextBlock, known_type("text")]


def _text_block(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


Texts = Annotated[list[_Text], one_or_list(_text_block, "text blocks"), STRING_OR_OBJECTS]


class ToolResultBlock(_Block):
    """The result of a tool call. ``is_error`` has no effect: models see the text."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=256)]
    content: Texts | None = None
    is_error: bool | None = None


_TYPES = ("text", "thinking", "redacted_thinking", "tool_use", "tool_result")
ContentBlock = Annotated[
    Annotated[
        TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
    ],
    known_type(*_TYPES),
]


class InputMessage(Strict):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], one_or_list(_text_block, "blocks"), STRING_OR_OBJECTS]

    @model_validator(mode="after")
    def _blocks_of_the_role(self) -> Self:
        allowed = {
            "user": (TextBlock, ToolResultBlock),
            "assistant": (TextBlock, ThinkingBlock, RedactedThinkingBlock, ToolUseBlock),
            "system": (TextBlock,),
        }[self.role]
        for index, block in enumerate(self.content):
            if not isinstance(block, allowed):
                raise ValueError(f"content[{index}]: a message of the role {self.role!r} has no block {block.type!r}")
        return self


class CustomTool(_Block):
    """A tool of the client. Tools that run on the server are not supported."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


def _check_tool(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "custom":
        raise ValueError(f"the type {kind[:40]!r} is not supported; only tools of the client are (type custom)")
    return value


class ToolChoice(Strict):
    """Which tools the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_its_tool(self) -> Self:
        if self.type == "tool" and self.name is None:
            raise ValueError("name: is required for the type tool")
        return self


class Thinking(Strict):
    """A switch of the model's reasoning; ``adaptive`` leaves it to the model."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Strict):
    """The JSON schema of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """The form of the answer, and how much the model reasons."""

    effort: Annotated[str, Field(max_length=64)] | None = None
    format: OutputFormat | None = None


class CountTokensRequest(SamplingExtensions):
    """The body of POST /v1/messages/count_tokens, and the fields that both routes have."""

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts | None = None
    tools: Annotated[list[Annotated[CustomTool, BeforeValidator(_check_tool)]], Field(max_length=MAX_TOOLS)] | None = (
        None
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    # Accepted, because they change nothing in an answer: every prefix is cached.
    cache_control: dict[str, Any] | None = None
    betas: list[str] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Field(max_length=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None

    metadata: Annotated[dict[str, Any], Field(max_length=MAX_FIELDS)] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


def chat_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of the chat request, of which the chat's schema may refuse more."""
    chat: dict[str, Any] = {"model": body.model, "messages": _messages(body), **body.extensions()}
    if body.tools:
        chat["tools"] = [_tool(tool) for tool in body.tools]
    if body.tool_choice is not None:
        choice = body.tool_choice
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
    if body.thinking is not None and body.thinking.type != "adaptive":
        chat["enable_thinking"] = body.thinking.type == "enabled"
    if body.thinking is not None and body.thinking.type == "enabled" and body.thinking.budget_tokens is not None:
        chat.setdefault("thinking_token_budget", body.thinking.budget_tokens)
    if body.thinking is not None and body.thinking.display == "omitted":
        chat["include_reasoning"] = False
    if body.output_config is not None:
        if body.output_config.effort is not None:
            chat["reasoning_effort"] = body.output_config.effort
        if body.output_config.format is not None:
            chat["response_format"] = {
                "type": "json_schema",
                "json_schema": {"name": "answer", "schema": body.output_config.format.schema_},
            }
    if isinstance(body, MessagesRequest):
        named_fields = {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "stream": body.stream,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
        }
        chat |= {name: value for name, value in named_fields.items() if value is not None}
    if _continues(body):
        # As in Anthropic's API: a last message of the assistant is the start of the answer.
        chat |= {"add_generation_prompt": False, "continue_final_message": True}
    return chat


def _continues(body: CountTokensRequest) -> bool:
    last = body.messages[-1]
    if last.role != "assistant":
        return False
    return all(isinstance(block, TextBlock) for block in last.content)


def _tool(tool: CustomTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _messages(body: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.system:
        messages.append({"role": "system", "content": _joined(body.system)})
    for message in body.messages:
        messages += _chat_messages(message)
    return messages


def _joined(content: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in content)


def _chat_messages(message: InputMessage) -> list[dict[str, Any]]:
    """Return the chat's messages of one message: each result of a tool is a message of its own."""
    texts = [block for block in message.content if isinstance(block, TextBlock)]
    if message.role == "assistant":
        return [_assistant(message.content, texts)]
    messages: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            result = _joined(block.content or [])
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": result})
    if texts or not messages:
        messages.append({"role": message.role, "content": _joined(texts)})
    return messages


def _assistant(blocks: Sequence[Any], texts: Sequence[TextBlock]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in texts)}
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [block for block in blocks if isinstance(block, ToolUseBlock)]
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": msgspec.json.encode(call.input).decode()},
            }
            for call in calls
        ]
    return made


_encode = msgspec.json.Encoder().encode
_ERROR_PATH = "/v1/messages"


def _event(payload: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (payload["type"].encode(), _encode(payload))


class MessageWriter:
    """A writer of the one answer to a request; ``input_tokens`` does not count what the prefix cache had."""

    def __init__(self, *, id: str, model: str, choices: list[Choice], blocks: AnswerBlocks) -> None:
        self._head = {"id": id, "type": "message", "role": "assistant", "model": model}
        self._choice = choices[0]
        self._blocks = blocks
        self._report = UsageReport(choices, 1, None)
        self._started = False
        self._last: Delta | None = None

    def chunk(self, delta: Delta) -> bytes:
        """Return the events of one delta."""
        events = [] if self._started else [self._start()]
        self._started = True
        events += [_event(payload) for change in self._blocks.feed(delta) for payload in _payloads(change)]
        if delta.finish_reason is not None:
            self._last = delta
        return b"".join(events)

    def _start(self) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }
        return _event({"type": "message_start", "message": message})

    def usage(self) -> dict[str, Any]:
        """Return the token counts so far, in OpenAI's form, which the gateway reads."""
        return self._report.usage()

    def _usage(self) -> dict[str, Any]:
        cached = self._choice.num_cached_tokens
        return {
            "input_tokens": len(self._choice.prompt_token_ids) - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._choice.num_tokens,
        }

    def last(self, choices: list[Choice]) -> bytes:
        """Return the end of the stream."""
        assert self._last is not None, "the end of a stream before its last delta"
        delta = {"type": "message_delta", "delta": self._stop(self._last), "usage": self._usage()}
        return _event(delta) + _event({"type": "message_stop"})

    def failed(self, error: RequestError) -> bytes:
        """Return the last event of a stream that failed."""
        return b"event: error\ndata: " + error_body(error, _ERROR_PATH) + b"\n\n"

    def whole(self, choices: list[Choice], answers: list[Delta]) -> bytes:
        """Return the body of an answer that is not streamed."""
        (answer,) = answers
        self._blocks.feed(answer)
        content = [_content(block, whole=True) for block in self._blocks.blocks]
        return _encode({**self._head, "content": content, **self._stop(answer), "usage": self._usage()})

    def _stop(self, delta: Delta) -> dict[str, Any]:
        stop = delta.stop_reason if isinstance(delta.stop_reason, str) else None
        if delta.finish_reason == "length":
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stop is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop}


def _content(block: Block, *, whole: bool) -> dict[str, Any]:
    text = block.text if whole else ""
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if block.kind == "text":
        return {"type": "text", "text": text}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": block.arguments() if whole else {}}


def _payloads(change: Change) -> list[dict[str, Any]]:
    index = change.block.number
    match change:
        case Opened(block):
            return [{"type": "content_block_start", "index": index, "content_block": _content(block, whole=False)}]
        case Grown(block, text):
            return [{"type": "content_block_delta", "index": index, "delta": _delta(block, text)}]
        case Closed(block):
            stop = {"type": "content_block_stop", "index": index}
            if block.kind != "reasoning":
                return [stop]
            signature = {"type": "signature_delta", "signature": ""}
            return [{"type": "content_block_delta", "index": index, "delta": signature}, stop]


def _delta(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "thinking_delta", "thinking": text}
    if block.kind == "text":
        return {"type": "text_delta", "text": text}
    return {"type": "input_json_delta", "partial_json": text}


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
