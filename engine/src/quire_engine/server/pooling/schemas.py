"""The schemas of the requests for embeddings, reranking and scores: types and ranges."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, SkipValidation, WithJsonSchema, field_validator, model_validator

from quire_engine.server.http.schema_checks import json_type
from quire_engine.server.openai.schemas import Prompt, Strict, TruncatedTo


def _check_texts(value: Any) -> Any:
    texts = [value] if isinstance(value, str | dict) else value
    if not isinstance(texts, list) or not texts:
        raise ValueError(f"should be a string or an array of strings, not {json_type(value)}")
    return [_text(number, item) for number, item in enumerate(texts)]


def _text(number: int, item: Any) -> str:
    """Return the text of a string, or of an object in the form of Jina's and Cohere's APIs."""
    text = item.get("text") if isinstance(item, dict) and item.keys() == {"text"} else item
    if not isinstance(text, str):
        raise ValueError(f'item {number} should be a string or an object {{"text": ...}}, not {json_type(item)}')
    if not text:
        raise ValueError(f"item {number} is empty; it should have at least one character")
    return text


_text_object = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 1}},
    "required": ["text"],
    "additionalProperties": False,
}
_text_schemas = [{"type": "string", "minLength": 1}, _text_object]
Texts = Annotated[
    SkipValidation[list[str]],
    BeforeValidator(_check_texts),
    WithJsonSchema({"anyOf": [*_text_schemas, {"type": "array", "items": {"anyOf": _text_schemas}, "minItems": 1}]}),
]


class PoolingRequest(Strict):
    """The fields of all requests that pool."""

    model: str | None = None
    truncate_prompt_tokens: TruncatedTo | None = Field(
        None, description="Keep this number of tokens of each prompt; -1 keeps as many as the context holds."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="The side on which truncate_prompt_tokens cuts; right unless set."
    )
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = Field(
        0, description="Lower values run first. Needs --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Share cached prefixes only with requests that have the same salt."
    )
    user: str | None = None
    request_id: str | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _something_is_left(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("should be -1 or greater than 0")
        return value


class EmbeddingRequest(PoolingRequest):
    """The body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cut the embedding to its first dimensions, for models that are trained for it."
    )
    normalize: bool | None = Field(None, description="Scale to length 1; what the model's folder says unless set.")
    add_special_tokens: bool = True

    @field_validator("input")
    @classmethod
    def _no_text_is_empty(cls, value: list[str | list[int]]) -> list[str | list[int]]:
        if (empty := next((number for number, item in enumerate(value) if not item), None)) is not None:
            raise ValueError(f"item {empty} is empty; it should have at least one token")
        return value


class RerankRequest(PoolingRequest):
    """The body of POST /v1/rerank."""

    query: Annotated[str, Field(min_length=1)]
    documents: Texts
    top_n: Annotated[int, Field(ge=0)] | None = Field(None, description="Return only this number of documents.")
    return_documents: bool | None = Field(None, description="Return the texts with their scores; true unless set.")
    instruction: str | None = Field(None, description="The task that a reranker judges by.")


class ScoreRequest(PoolingRequest):
    """The body of POST /v1/score."""

    text_1: Texts
    text_2: Texts
    instruction: str | None = Field(None, description="The task that a reranker judges by.")

    @model_validator(mode="after")
    def _pairs(self) -> Self:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise ValueError(
                f"text_1: has {len(self.text_1)} texts and text_2 has {len(self.text_2)}; it should have one text, or "
                "one for each of text_2"
            )
        return self
