"""The schemas of the requests to the completion routes: types and ranges.

Fields of OpenAI's and vLLM's APIs that this version does not support are refused by name, never ignored.
"""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SkipValidation,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from quire_engine.api.body import json_type

NO_EFFECT: tuple[Any, ...] = (None, [], {}, False)
"""The values without an effect in a field of this table."""
EMPTY: tuple[Any, ...] = (None, [], {}, "")
"""The values without an effect in a field that is unknown."""

_CHAT_ONLY = "only POST /v1/chat/completions has it"
_FUNCTIONS = "is not supported, because tools and tool_choice have replaced it"
_TEXT_ONLY = "only text is supported by this version"

Unsupported = Mapping[str, tuple[tuple[Any, ...], str]]
"""Fields with further values that have no effect, and the reason to refuse all others."""

UNSUPPORTED: Unsupported = {
    "tools": ((), _CHAT_ONLY),
    "tool_choice": (("none", "auto"), _CHAT_ONLY),
    "parallel_tool_calls": ((True,), _CHAT_ONLY),
    "functions": ((), _FUNCTIONS),
    "function_call": (("none", "auto"), _FUNCTIONS),
    "modalities": ((["text"],), 'only ["text"] is supported by this version'),
    "audio": ((), "audio is not supported by this version"),
    "include_reasoning": ((True,), _CHAT_ONLY),
    "thinking_token_budget": ((), _CHAT_ONLY),
    "detokenize": ((True,), "answers always have text"),
    "return_tokens_as_token_ids": ((), "is not supported by this version; return_token_ids returns the ids"),
    "logprob_token_ids": ((), "is not supported by this version"),
    "return_token_offsets": ((), "is not supported by this version"),
    "return_prompt_text": ((), "is not supported by this version; /detokenize returns the text of tokens"),
    "prompt_embeds": ((), "embeddings as prompts are not supported by this version"),
    "repetition_detection": ((), "is not supported by this version"),
    "watermarking": ((), "is not supported by this version"),
    "kv_transfer_params": ((), "the transfer of KV caches is not supported by this version"),
    "ec_transfer_params": ((), "the transfer of encoder caches is not supported by this version"),
    "mm_processor_kwargs": ((), _TEXT_ONLY),
    "media_io_kwargs": ((), _TEXT_ONLY),
    "mm_payload": ((), _TEXT_ONLY),
    "return_mm_kwargs": ((), _TEXT_ONLY),
    "routed_experts_prompt_start": ((0,), "is not supported by this version"),
    "suffix": (("",), "filling in the middle is not supported by this version"),
    "prediction": ((), "predicted outputs are not supported by this version"),
    "moderation": ((), "moderation is not supported by this version"),
    "web_search_options": ((), "web search is not supported by this version"),
    "best_of": ((1,), "is not supported; use n, which returns as many answers, and choose among them"),
    "use_beam_search": ((), "beam search is not supported by this version"),
    "documents": ((), "is not supported by this version; put the documents into a message"),
    "chat_template": ((), "is not supported in requests; start the server with --chat-template"),
    "logits_processors": ((), "is not supported by this version"),
}


def remove_empty(content: dict[str, Any], known: Collection[str]) -> None:
    """Remove unknown fields without a value: whatever they mean, the client sets nothing."""
    for name in content.keys() - set(known):
        if any(content[name] == each and type(content[name]) is type(each) for each in EMPTY):
            del content[name]


def remove_unsupported(
    content: dict[str, Any], known: Collection[str], unsupported: Unsupported = UNSUPPORTED
) -> list[str]:
    """Remove unsupported fields from the body, and return the reasons to refuse those that would have an effect.

    ``known`` are the fields that the route supports.
    """
    reasons = []
    for name in (unsupported.keys() & content.keys()) - set(known):
        harmless, reason = unsupported[name]
        value = content.pop(name)
        if not any(value == each and type(value) is type(each) for each in (*NO_EFFECT, *harmless)):
            reasons.append(f"{name}: {reason}")
    return sorted(reasons)


MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_N = 128
MAX_BAD_WORDS = 256
MAX_FIELDS = 256
MAX_LOGIT_BIASES = 10_000
MAX_ALLOWED_TOKEN_IDS = 10_000


def _check_stop(value: Any) -> Any:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError(f"should be a string or an array of strings, not {json_type(value)}")
    if len(stops) > MAX_STOP_STRINGS:
        raise ValueError(f"has {len(stops)} stop strings; at most {MAX_STOP_STRINGS} are accepted")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise ValueError(f"each stop string should have 1 to {MAX_STOP_CHARACTERS} characters")
    return stops


def _check_logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"should be an object of token ids and biases, not {json_type(value)}")
    if len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"has {len(value)} tokens; at most {MAX_LOGIT_BIASES} are accepted")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not str(key).isdecimal() or len(str(key)) > 9:
            raise ValueError(f"has the key {str(key)[:20]!r}, which is not a token id")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} should be a number from -100 to 100")
        pairs[int(key)] = float(bias)
    return pairs


def _check_allowed(value: Any) -> Any:
    if not isinstance(value, list) or not value or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError("should be a non-empty array of token ids")
    if len(value) > MAX_ALLOWED_TOKEN_IDS:
        raise ValueError(f"has {len(value)} tokens; at most {MAX_ALLOWED_TOKEN_IDS} are accepted")
    return value


def _check_prompt(value: Any) -> Any:
    """Return one of the four forms as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("should be a string, an array of strings, an array of token ids or an array of such arrays")
    types = _types(value)
    if types == {str}:
        return value
    if types == {int}:
        return [_token_ids(value)]
    if types == {list}:
        return [_token_ids(item) for item in value]
    raise ValueError("mixes strings, token ids and arrays; it should contain one kind only")


def _token_ids(value: list[Any]) -> list[int]:
    if _types(value) != {int} or min(value) < 0:
        raise ValueError("a prompt of token ids should be a non-empty array of integers from 0")
    return value


def _types(value: list[Any]) -> set[type]:
    """Return the types of the items; a loop in Python over all tokens of a long prompt would take far longer."""
    return set(map(type, value))


def _check_tokens(value: Any) -> Any:
    if not isinstance(value, list) or (value and (_types(value) != {int} or min(value) < 0 or max(value) >= 2**31)):
        raise ValueError("should be an array of token ids")
    return value


def _check_json(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise ValueError(f"should be an object or a string of JSON, not {json_type(value)}")
    return value


_ids_schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}

# A value that a function has checked is not checked again: a union would try every form on every item.
Stop = Annotated[
    SkipValidation[list[str]],
    BeforeValidator(_check_stop),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARACTERS},
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]
LogitBias = Annotated[
    SkipValidation[dict[int, float]],
    BeforeValidator(_check_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIASES,
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
AllowedTokenIds = Annotated[
    SkipValidation[list[int]],
    BeforeValidator(_check_allowed),
    WithJsonSchema({**_ids_schema, "maxItems": MAX_ALLOWED_TOKEN_IDS}),
]
Tokens = Annotated[
    SkipValidation[list[int]],
    BeforeValidator(_check_tokens),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}}),
]
BadWords = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
    Field(max_length=MAX_BAD_WORDS),
]
JsonObject = Annotated[
    SkipValidation[dict[str, Any] | str],
    BeforeValidator(_check_json),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]}),
]
Prompt = Annotated[
    SkipValidation[list[str] | list[list[int]]],
    BeforeValidator(_check_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _ids_schema,
                {"type": "array", "items": _ids_schema, "minItems": 1},
            ]
        }
    ),
]

TruncatedTo = Annotated[
    int,
    Field(ge=-1),
    WithJsonSchema({"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]}),
]


class Strict(BaseModel):
    """A schema that converts no types and refuses unknown fields, with bounds on the number of possible errors."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise ValueError(f"has {len(value)} fields; at most {MAX_FIELDS} are accepted")
        return value


class StreamOptions(Strict):
    """Options of a streamed answer."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage of the whole request.")
    continuous_usage_stats: bool | None = Field(None, description="Send the usage so far in every chunk.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Accepted for compatibility; chunks are not padded."
    )


class JsonSchemaFormat(Strict):
    """A JSON schema that the answer follows. Further fields have no effect; ``strict`` is what every schema is here."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of an answer. ``structural_tag`` has ``format``, or ``structures`` and ``triggers``."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and (self.json_schema is None or self.json_schema.schema_ is None):
            raise ValueError("json_schema.schema: is required for the type json_schema")
        if self.type == "structural_tag" and self.format is None and self.structures is None:
            raise ValueError("format: is required for the type structural_tag, or structures and triggers")
        return self


Choices = Annotated[list[str], Field(min_length=1)]


class StructuredOutputs(Strict):
    """A constraint of the answer, with vLLM's names; exactly one of the first six."""

    json_: JsonObject | None = Field(None, alias="json", description="A JSON schema.")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(None, description="A grammar in Lark's or llama.cpp's notation.")
    json_object: Literal[True] | None = None
    structural_tag: JsonObject | None = None
    disable_any_whitespace: bool | None = Field(None, description="Allow no space between the tokens of JSON.")
    disable_additional_properties: Literal[False] | None = None
    whitespace_pattern: Annotated[str, Field(max_length=256)] | None = Field(
        None, description="A regular expression of the space between the tokens of JSON."
    )

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        names = ("json_", "regex", "choice", "grammar", "json_object", "structural_tag")
        given = [name.rstrip("_") for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            found = "no constraint" if not given else " and ".join(given)
            raise ValueError(f"has {found}; expected exactly one of {', '.join(name.rstrip('_') for name in names)}")
        return self


class GenerationRequest(Strict):
    """The fields of both completion routes. None means that the client sets no value: the model's default applies."""

    model: str | None = Field(None, description="The first served name, where it is omitted.")
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1, description="0 and -1 mean all tokens.")] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = Field(
        None, description="Keep the most typical tokens up to this share of the probability."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    logit_bias: LogitBias | None = None
    allowed_token_ids: AllowedTokenIds | None = Field(None, description="The only tokens that are sampled.")
    bad_words: BadWords | None = Field(
        None, description="Words that are not sampled, with or without a space before them."
    )
    prompt_logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Report the logprob of each prompt token but the first, and this number of likeliest tokens."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: TruncatedTo | None = Field(
        None, description="Keep only the last tokens of the prompt, this number of them; -1 leaves room for the answer."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side on which truncate_prompt_tokens cuts; left unless set."
    )
    return_token_ids: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Share cached prefixes only with requests that have the same salt."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="Lower values run first. Needs --scheduling-policy priority."
    )

    response_format: ResponseFormat | None = Field(None, description="The form of the answer.")
    structured_outputs: StructuredOutputs | None = Field(None, description="A constraint of the answer.")
    guided_json: JsonObject | None = Field(None, description="The older name of structured_outputs.json.")
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: Annotated[str, Field(max_length=256)] | None = None
    guided_decoding_backend: str | None = Field(None, description="Accepted; there is one backend.")

    # Accepted, because they change nothing in an answer.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    request_id: str | None = None
    session_id: str | None = None
    length_penalty: float | None = Field(None, description="Of beam search, which is not supported.")
    early_stopping: bool | None = Field(None, description="Of beam search, which is not supported.")
    spaces_between_special_tokens: bool | None = None
    stream_interval: int | None = None
    vllm_xargs: dict[str, Any] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("should be -1 or greater than 0")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: is only allowed with stream set to true")
        return self


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Report this number of likeliest tokens with each sampled one."
    )
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="0 samples nothing, for echo and logprobs of the prompt."
    )
    echo: bool | None = Field(None, description="Return the prompt before the answer, with its logprobs if requested.")
    add_special_tokens: bool = True
