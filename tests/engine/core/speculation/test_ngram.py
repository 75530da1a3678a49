"""Prompt lookup proposes what followed the most recent tokens before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.speculation.proposers import MOST_NEW_TOKENS, NgramIndex


def indexed(tokens: list[int], *, shortest: int = 2) -> NgramIndex:
    index = NgramIndex(shortest=shortest, longest=4, most_tokens=len(tokens))
    while not index.extend(tokens):
        pass
    return index


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([], []),
        ([5], []),
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 1], []),  # one token is no match
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1]),
        ([7, 1, 2, 9, 8, 6, 1, 2, 5, 4, 3, 7, 1, 2], [9, 8, 6, 1]),  # the longer match wins over the newer
        ([1, 2, 9, 8, 6, 1, 2, 5, 4, 3, 1, 2], [5, 4, 3, 1]),  # the newer of equal ones
        ([4, 4, 4], [4, 4, 4, 4]),  # a repetition goes on
        ([1, 2, 3, 1, 2, 3], [1, 2, 3, 1]),
    ],
)
def test_tokens_after_the_ngram_match_are_proposed(text: list[int], expected: list[int]) -> None:
    assert indexed(text).propose(text, 4) == expected


def test_shortest_match_of_one_and_of_three() -> None:
    text = [1, 2, 3, 9, 2, 3]
    assert indexed(text, shortest=1).propose(text, 1) == [9]
    assert indexed(text, shortest=3).propose(text, 1) == []


def test_a_long_prompt_is_indexed_in_several_calls() -> None:
    text = [*range(MOST_NEW_TOKENS + 10), 0, 1]
    index = NgramIndex(shortest=2, longest=4, most_tokens=len(text))
    assert not index.extend(text)
    assert index.extend(text)
    assert index.propose(text, 3) == [2, 3, 4]


@given(
    text=st.lists(st.integers(0, 3), max_size=60),
    cut=st.integers(0, 60),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_proposals_match_a_plain_search(text: list[int], cut: int, shortest: int, more: int) -> None:
    longest = shortest + more
    index = NgramIndex(shortest=shortest, longest=4, most_tokens=len(text))
    index.extend(text[:cut])
    index.extend(text)
    proposal = index.propose(text, 5)
    matches = [
        (size, end)
        for size in range(shortest, longest + 1)
        for end in range(max(size, len(text) - 32), len(text))  # among the candidates that any search compares
        if text[end - size : end] == text[len(text) - size :]
    ]
    if not matches:
        assert not proposal or len(text) > 32
        return
    size, end = max(matches)
    expected = list(text)
    for place in range(5):
        expected.append(expected[end + place])
    if len(text) <= 32:
        assert proposal == expected[len(text) :]
    assert len(proposal) == 5
