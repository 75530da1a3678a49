"""The schemas of chats: messages, tools, variables of the chat template, and the request itself.

The fields that chats share with completions are in ``schemas``.
"""

from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    SkipValidation,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import core_schema

from quire_engine.server.http.schema_checks import json_type
from quire_engine.server.openai.schemas import MAX_FIELDS, GenerationRequest, Strict

MAX_MESSAGES = 10_000
MAX_TOOLS = 1024


def _check_content(value: Any) -> Any:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError(f"should be a string or an array of text parts, not {json_type(value)}")
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"part {index} has the type {kind[:40]!r}; this version supports text parts only")
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'part {index} should be {{"type": "text", "text": "…"}}')
    return value


Content = Annotated[
    SkipValidation[str | list[dict[str, str]]],
    BeforeValidator(_check_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                    },
                },
            ]
        }
    ),
]


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _check_arguments(text: str) -> str:
    if text.strip() and not _is_json_object(text):
        raise ValueError("should be a JSON object in a string")
    return text


Arguments = Annotated[str, AfterValidator(_check_arguments)]
"""The arguments of an earlier tool call: a JSON object in a string, or an empty one."""


class FunctionCall(Strict):
    """The function of a tool call, with its arguments as JSON."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: Arguments


class ToolCall(Strict):
    """A tool call of an assistant's earlier message."""

    model_config = ConfigDict(extra="ignore")

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a conversation. The model's chat template defines the meaning of a role.

    Further fields have no effect, because clients send back what other servers have added to a message.
    """

    model_config = ConfigDict(extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_FIELDS)] | None = Field(
        None, description="The tool calls of an assistant's earlier message."
    )
    tool_call_id: str | None = Field(None, description="The call that a tool's message answers.")
    reasoning_content: str | None = None
    reasoning: str | None = Field(None, description="The newer name of reasoning_content.")
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ValueError("content: is required")
        return self


def _checked_as(model: Any) -> GetPydanticSchema:
    """Return an annotation for JSON that is checked as ``model`` and stays as the client sent it."""

    def as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        check(value)
        return value

    return GetPydanticSchema(
        lambda source, handler: core_schema.no_info_wrap_validator_function(as_sent, handler(model))
    )


# A worker process renders the messages, which gets them as JSON.
Messages = Annotated[
    list[dict[str, Any]], _checked_as(Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)])
]


class FunctionDefinition(Strict):
    """A function that the model may call. Further fields have no effect."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="The JSON Schema of the arguments.")
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call; the chat template shows it to the model as the client sent it."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: FunctionDefinition


Tools = Annotated[list[dict[str, Any]], _checked_as(Annotated[list[Tool], Field(max_length=MAX_TOOLS)])]


def _check_tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError('should be "none", "auto", "required" or {"type": "function", "function": {"name": "…"}}')
    return value


ToolChoice = Annotated[
    SkipValidation[str | dict[str, Any]],
    BeforeValidator(_check_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def _check_variables(value: dict[str, Any]) -> dict[str, Any]:
    reserved = {"messages", "tools", "documents", "add_generation_prompt", "chat_template"} & value.keys()
    if reserved:
        raise ValueError(f"may not set {', '.join(sorted(reserved))}")
    return value


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]


class TemplateFields(Strict):
    """The fields, besides the messages, that decide what the chat template renders."""

    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = Field(
        None, description="A variable of the chat template, unless chat_template_kwargs sets it."
    )
    enable_thinking: bool | None = Field(
        None, description="A variable of the chat template, unless chat_template_kwargs sets it."
    )

    @property
    def template_variables(self) -> dict[str, Any]:
        """The variables of the chat template that the request sets."""
        named = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.enable_thinking}
        given = {name: value for name, value in named.items() if value is not None}
        return {**given, **(self.chat_template_kwargs or {})}


class ChatCompletionRequest(TemplateFields, GenerationRequest):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    tool_choice: ToolChoice | None = Field(None, description="auto unless set, where the request has tools.")
    parallel_tool_calls: bool | None = Field(None, description="With false, an answer has at most one tool call.")
    include_reasoning: bool | None = Field(None, description="With false, answers omit the model's reasoning.")
    add_special_tokens: bool = False
    thinking_token_budget: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = Field(
        None, description="The most tokens of reasoning; then it is ended."
    )
    verbosity: Literal["low", "medium", "high"] | None = None
    echo: Literal[False] | None = None

    @property
    def forced_tool(self) -> str | None:
        """The name of the tool that the answer has to call; None where the request names none."""
        name: str | None = self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None
        return name

    @property
    def tool_schemas(self) -> dict[str, dict[str, Any]] | None:
        """The schemas of the tools that the answer may call, by name; None where it calls none."""
        if not self.tools or self.tool_choice == "none":
            return None
        functions = [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @model_validator(mode="after")
    def _declared(self) -> Self:
        if self.tool_choice is None or self.tool_choice in ("none", "auto"):
            return self
        if not self.tools:
            raise ValueError("tool_choice: needs tools to choose from")
        if isinstance(self.tool_choice, dict):
            name = self.tool_choice["function"]["name"]
            if name not in (self.tool_schemas or {}):
                raise ValueError(f"tool_choice: {name[:100]!r} is not one of the tools")
        return self

    @model_validator(mode="after")
    def _supported_together(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: is only allowed with logprobs set to true")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message: needs add_generation_prompt set to false")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_completion_tokens: differs from max_tokens, its older name; send only one of them")
        return self
