"""The schemas of the answers with embeddings and scores, for /openapi.json only: the routes write bytes."""

from typing import Literal

from pydantic import BaseModel


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


ANSWERS: tuple[type[BaseModel], ...] = (EmbeddingList, Ranking, ScoreList)
