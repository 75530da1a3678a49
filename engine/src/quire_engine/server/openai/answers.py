"""What the routes answer, for /openapi.json alone: the writers write bytes, and tests hold the two equal.

Fields beyond these may come with later versions; clients leave aside what they don't know.
"""

from typing import Any, Literal

from pydantic import BaseModel

FinishReason = Literal["stop", "length"]


class Problem(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What went wrong, as OpenAI writes it: at most 4 KiB."""

    error: Problem


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TokenLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(BaseModel):
    """Of a token of the prompt, or of one that was likely in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of the prompt; null for the first. Where ``prompt_logprobs`` is asked for."""


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """A whole answer; ``stream`` sends ChatCompletionChunk events instead."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str = ""


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One ``data:`` of a stream, which ends in ``data: [DONE]``, or in an event named error with an ErrorAnswer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """A whole answer, and one ``data:`` of a stream alike; there only the last chunk has the usage, if asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class PromptText(BaseModel):
    prompt: str


class Status(BaseModel):
    """``reason`` where it failed, ``in_flight`` while it drains."""

    status: str
    reason: str | None = None
    in_flight: int | None = None


class Version(BaseModel):
    version: str


ANSWERS: tuple[type[BaseModel], ...] = (
    ErrorAnswer,
    ChatCompletion,
    ChatCompletionChunk,
    Completion,
    ModelList,
    Model,
    Tokens,
    PromptText,
    Status,
    Version,
)


def schemas() -> dict[str, Any]:
    """The components of the document, by name."""
    made: dict[str, Any] = {}
    for answer in ANSWERS:
        schema = answer.model_json_schema(ref_template="#/components/schemas/{model}")
        made |= schema.pop("$defs", {})
        made[answer.__name__] = schema
    return made
