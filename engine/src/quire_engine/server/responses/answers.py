"""The schemas of the answers of /v1/responses, for /openapi.json only: the routes write bytes."""

from typing import Any, Literal

from pydantic import BaseModel


class ResponsePart(BaseModel):
    """A part of an item; a text has annotations, which are empty, and logprobs where they are included."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class ResponseItem(BaseModel):
    """An item of a response: a message and reasoning have content, a function call has a name and arguments."""

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[ResponsePart] | None = None
    summary: list[Any] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseFailure(BaseModel):
    """The reason why a response failed."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class ResponseUsage(BaseModel):
    """The number of tokens of a request and its answer."""

    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseObject(BaseModel):
    """A response. Further fields repeat the request."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFailure | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[ResponseItem]
    previous_response_id: None
    store: Literal[False]
    usage: ResponseUsage | None


class ResponseEvent(BaseModel):
    """One ``data:`` of a stream; its other fields depend on the type, as in OpenAI's API."""

    type: str
    sequence_number: int


ANSWERS: tuple[type[BaseModel], ...] = (ResponseObject, ResponseEvent)
