"""Embeddings, similarities and scores from what the engine reads, and prompts that are cut."""

import math
import struct
from array import array
from base64 import b64decode
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.api.embeddings import (
    base64_of,
    embedding,
    relevance,
    similarity,
)
from quire_engine.api.pooling import ServedPooling, pair_prompt, truncated
from quire_engine.config import PoolingSetup
from quire_engine.core.sampling_params import Pooling


def part(*values: float) -> bytes:
    return array("f", values).tobytes()


@pytest.mark.parametrize(
    ("parts", "options", "expected"),
    [
        ([part(3, 4)], {"divisor": 1, "dimensions": None, "normalize": True}, [0.6, 0.8]),
        ([part(3, 4)], {"divisor": 1, "dimensions": None, "normalize": False}, [3, 4]),
        ([part(3, 4), part(3, 0)], {"divisor": 4, "dimensions": None, "normalize": False}, [1.5, 1]),
        ([part(3, 4), part(0, 0)], {"divisor": 4, "dimensions": None, "normalize": True}, [0.6, 0.8]),
        # It is cut before it is scaled.
        ([part(3, 4, 12)], {"divisor": 1, "dimensions": 2, "normalize": True}, [0.6, 0.8]),
        ([part(0, 0)], {"divisor": 1, "dimensions": None, "normalize": True}, [0, 0]),
    ],
)
def test_embeddings(parts: list[bytes], options: dict[str, object], expected: list[float]) -> None:
    assert embedding(parts, **options).tolist() == pytest.approx(expected)  # type: ignore[arg-type]


def test_base64_is_little_endian_float32() -> None:
    assert struct.unpack("<2f", b64decode(base64_of(array("f", [0.5, -2.0])))) == (0.5, -2.0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [([1, 0], [2, 0], 1.0), ([1, 0], [0, 3], 0.0), ([1, 1], [-2, -2], -1.0), ([0], [1], 0)],
)
def test_similarity(one: list[float], other: list[float], expected: float) -> None:
    assert similarity(one, other) == pytest.approx(expected)


@given(yes=st.floats(-1e4, 1e4, width=32), no=st.floats(-1e4, 1e4, width=32))
def test_relevance_is_the_probability_of_the_positive_token(yes: float, no: float) -> None:
    most = max(yes, no)
    share = math.exp(yes - most) / (math.exp(yes - most) + math.exp(no - most))
    assert relevance([part(yes, no)]) == pytest.approx(share, abs=1e-9)


def test_relevance_of_one_logit() -> None:
    assert relevance([part(0)]) == 0.5


def served(first: tuple[int, ...] = (), last: tuple[int, ...] = ()) -> ServedPooling:
    return ServedPooling(
        setup=PoolingSetup(hidden_size=4), pooling=Pooling(), first_ids=first, last_ids=last, has_pair_template=False
    )


@dataclass(frozen=True)
class Cut:
    kept: int
    side: str | None
    first: tuple[int, ...]
    last: tuple[int, ...]
    expected: list[int]


@pytest.mark.parametrize(
    "cut",
    [
        Cut(6, None, (), (), [1, 2, 3, 4, 5]),
        Cut(3, None, (), (), [1, 2, 3]),
        Cut(3, "left", (), (), [3, 4, 5]),
        Cut(3, None, (), (5,), [1, 2, 5]),
        Cut(3, "left", (), (5,), [3, 4, 5]),
        Cut(3, "left", (1,), (), [1, 4, 5]),
        Cut(3, None, (1,), (5,), [1, 2, 5]),
        Cut(2, None, (1,), (5,), [1, 2]),
        Cut(3, None, (), (9,), [1, 2, 3]),
    ],
)
def test_truncation_keeps_special_tokens(cut: Cut) -> None:
    assert truncated([1, 2, 3, 4, 5], cut.kept, cut.side, served(cut.first, cut.last)) == cut.expected


def test_texts_of_a_pair_stay_as_they_are() -> None:
    prompt = pair_prompt("{document}", "{query} {instruction}", "{query}")
    assert "<Instruct>: {query}\n<Query>: {document}\n<Document>: {query} {instruction}<|im_end|>" in prompt
    assert prompt.endswith("<think>\n\n</think>\n\n")
