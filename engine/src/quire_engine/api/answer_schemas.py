"""The schemas of the answers, for /openapi.json only: the routes write bytes, and tests compare them with these."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from quire_common.contract.adapters_file import AdapterFailure, AdapterState

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorObject(BaseModel):
    """An error: its type is the class, its code the exact reason, its param the field."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """An error in OpenAI's form, of at most 4 KiB."""

    error: ErrorObject


class PromptTokensDetails(BaseModel):
    """The number of prompt tokens that were found in the prefix cache."""

    cached_tokens: int


class CompletionTokensDetails(BaseModel):
    """The number of answer tokens that are reasoning."""

    reasoning_tokens: int


class Usage(BaseModel):
    """The number of tokens of a request and of its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TokenLogprob(BaseModel):
    """The log probability of one token."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TokenLogprob):
    """The log probability of a sampled token, with those of the likeliest tokens."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """The logprobs of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(BaseModel):
    """The log probability of a token of the prompt, or of one that was likely in its place."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The logprobs by token id, for each token of the prompt; null for the first. Present with ``prompt_logprobs``."""


class CalledFunction(BaseModel):
    """The function of a tool call, with its arguments as JSON in a string, as the model wrote them."""

    name: str
    arguments: str


class AnswerToolCall(BaseModel):
    """A tool call of an answer."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(BaseModel):
    """The message of a chat answer. ``reasoning`` is the newer name of ``reasoning_content``."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[AnswerToolCall] | None = None


class ChatChoice(BaseModel):
    """One answer of a chat completion."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason
    stop_reason: str | int | None
    token_ids: list[int] | None = None


class ChatCompletion(BaseModel):
    """A chat completion that is not streamed; ``stream`` sends ChatCompletionChunk events instead."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionDelta(BaseModel):
    """The new part of a tool call's function: its name comes first, then its arguments."""

    name: str | None = None
    arguments: str


class ToolCallDelta(BaseModel):
    """The new part of a tool call; its first part has the id and the type."""

    index: int
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionDelta


class ChatDelta(BaseModel):
    """The new part of a message."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(BaseModel):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class ChatCompletionChunk(BaseModel):
    """One ``data:`` of a stream, which ends with ``data: [DONE]``, or with an event named error with an ErrorAnswer."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionLogprobArrays(BaseModel):
    """The logprobs of a completion, as parallel arrays over its tokens."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobArrays | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    """A completion, or one ``data:`` of a stream; in a stream only the last chunk has the usage, if requested."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """A name under which the model is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(BaseModel):
    """All names under which the model is served."""

    object: Literal["list"]
    data: list[Model]


class Tokens(BaseModel):
    """The tokens of a text."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class PromptText(BaseModel):
    """The text of token ids."""

    prompt: str


class Status(BaseModel):
    """The state of the server: with ``reason`` if it has failed, with ``in_flight`` while it drains."""

    status: str
    reason: str | None = None
    in_flight: int | None = None


class Version(BaseModel):
    """The version of the engine."""

    version: str


class AdapterStatus(BaseModel):
    """The state of one adapter in this engine."""

    name: str
    generation: int
    state: AdapterState
    reason: AdapterFailure | None
    message: str | None
    revision: str | None
    rank: int | None
    bytes: int | None


class AdapterSlotCounts(BaseModel):
    """The places for adapters on the device."""

    total: int
    used: int


class Adapters(BaseModel):
    """The adapters of this engine."""

    adapters: list[AdapterStatus]
    slots: AdapterSlotCounts
    loads_total: int


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


class PoolingUsage(BaseModel):
    """The number of tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embedding(BaseModel):
    """The embedding of one input: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(BaseModel):
    """The embeddings of all inputs, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: PoolingUsage


class RankedText(BaseModel):
    """The text of a document."""

    text: str


class RankedDocument(BaseModel):
    """The relevance of the document at ``index``; 1 is the highest."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(BaseModel):
    """Documents by relevance, the highest first."""

    id: str
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage


class Score(BaseModel):
    """The relevance of a pair of texts."""

    object: Literal["score"]
    index: int
    score: float


class ScoreList(BaseModel):
    """The scores of all pairs, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage


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
    Adapters,
    MessageErrorAnswer,
    AnsweredMessage,
    MessageEvent,
    InputTokens,
    ResponseObject,
    ResponseEvent,
    EmbeddingList,
    Ranking,
    ScoreList,
)


def schemas(answers: Sequence[type[BaseModel]]) -> dict[str, Any]:
    """Return the component schemas of the document by name."""
    made: dict[str, Any] = {}
    for answer in answers:
        schema = answer.model_json_schema(ref_template="#/components/schemas/{model}")
        made |= schema.pop("$defs", {})
        made[answer.__name__] = schema
    return made
