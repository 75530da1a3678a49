"""The schemas of the answers in Anthropic's form, for /openapi.json only: the routes write bytes."""

from typing import Any, Literal

from pydantic import BaseModel


class MessageError(BaseModel):
    """An error: its type is the class, its code the exact reason, its param the field."""

    type: str
    message: str
    param: str | None
    code: str | None


class MessageErrorAnswer(BaseModel):
    """An error in Anthropic's form, of at most 4 KiB."""

    type: Literal["error"]
    error: MessageError


class MessageText(BaseModel):
    """A text."""

    type: Literal["text"]
    text: str


class MessageThinking(BaseModel):
    """The model's reasoning. Its signature is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MessageToolUse(BaseModel):
    """A tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(BaseModel):
    """The number of tokens. Those that the prefix cache had are not input tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnsweredMessage(BaseModel):
    """A message that is not streamed."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[MessageText | MessageThinking | MessageToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(BaseModel):
    """One ``data:`` of a stream; its other fields depend on the type, as in Anthropic's API."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    ]


class InputTokens(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int


ANSWERS: tuple[type[BaseModel], ...] = (MessageErrorAnswer, AnsweredMessage, MessageEvent, InputTokens)
