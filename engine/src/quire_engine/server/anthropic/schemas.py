"""The schemas of POST /v1/messages and /v1/messages/count_tokens.

Fields of Anthropic's API that would have an effect which this server lacks are refused by name. The schema of the chat
request that a body becomes checks more, such as that ``tool_choice`` names one of the tools.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from quire_engine.server.http.schema_checks import STRING_OR_OBJECTS, known_type, one_or_list
from quire_engine.server.openai.chat_schemas import MAX_MESSAGES, MAX_TOOLS
from quire_engine.server.openai.extensions import SamplingExtensions
from quire_engine.server.openai.schemas import MAX_FIELDS, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS, Strict

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
