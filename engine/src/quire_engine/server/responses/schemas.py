"""The schema of POST /v1/responses.

Fields and items of OpenAI's API that would have an effect which this server lacks are refused by name. The schema of
the chat request that a body becomes checks more, such as that ``tool_choice`` names one of the tools.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from quire_common.contract.engine import NO_STORED_RESPONSES
from quire_engine.server.http.schema_checks import STRING_OR_OBJECTS, known_type, one_or_list
from quire_engine.server.openai.chat_schemas import MAX_MESSAGES, MAX_TOOLS, Arguments
from quire_engine.server.openai.extensions import SamplingExtensions
from quire_engine.server.openai.schemas import Stop, StreamOptions, Strict
from quire_engine.server.openai.unsupported import Unsupported

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
