"""The answers of both tracks to a greedy request are compared token by token, and near ties do not count."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.canary import (
    COMPARED_TOKENS,
    Result,
    Token,
    compare,
    greedy_body,
    read_answer,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GREEDY = {"model": "chat", "prompt": "x", "temperature": 0}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"temperature": 0.5}),
        (COMPLETIONS, {"temperature": None}),
        (COMPLETIONS, {"temperature": False}),
        (COMPLETIONS, {"n": 2}),
        (COMPLETIONS, {"echo": True}),
        (COMPLETIONS, {"prompt_logprobs": 1}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"max_tokens": 0}),
        ("/v1/embeddings", {}),
        ("/v1/responses", {}),
    ],
)
def test_other_requests_are_not_repeated(path: str, fields: dict[str, Any]) -> None:
    assert greedy_body(json.dumps(GREEDY | fields).encode(), path=path) is None


@pytest.mark.parametrize("body", [b"", b"[]", b"1", b"{", b'"x"', b"[" * 100_000, b"\xff"])
def test_broken_bodies_are_not_repeated(body: bytes) -> None:
    assert greedy_body(body, path=CHAT) is None


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {}, {"max_tokens": COMPARED_TOKENS, "logprobs": 5}),
        (COMPLETIONS, {"max_tokens": 7, "logprobs": 1}, {"max_tokens": 7, "logprobs": 5}),
        (COMPLETIONS, {"prompt": [1, 2]}, {"max_tokens": COMPARED_TOKENS, "logprobs": 5}),
        (COMPLETIONS, {"stream": True, "stream_options": {}}, {"max_tokens": COMPARED_TOKENS, "logprobs": 5}),
        (CHAT, {"max_completion_tokens": 5}, {"max_tokens": 5, "logprobs": True, "top_logprobs": 5}),
        (CHAT, {"temperature": 0.0, "n": 1}, {"max_tokens": COMPARED_TOKENS, "logprobs": True, "top_logprobs": 5}),
    ],
)
def test_repeated_request_is_short_and_has_logprobs(
    path: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = greedy_body(json.dumps(GREEDY | fields).encode(), path=path)
    assert found is not None
    kept = {name: value for name, value in (GREEDY | fields).items() if name in ("model", "prompt", "temperature")}
    assert json.loads(found) == kept | expected


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda x: (
            st.lists(x) | st.dictionaries(st.sampled_from(["temperature", "prompt", "n", "max_tokens", "messages"]), x)
        ),
        max_leaves=20,
    )
)
def test_any_body_is_repeated_or_not(body: Any) -> None:
    found = greedy_body(json.dumps(body).encode(), path=CHAT)
    assert found is None or json.loads(found)["temperature"] == 0


def token(text: str, logprob: float = -0.01, **top: float) -> Token:
    return Token(text=text, logprob=logprob, top={text: logprob, **top})


SAME, DIFFERENT, TIE = Result.SAME, Result.DIFFERENT, Result.NEAR_TIE
AB = [token("a"), token("b")]


@pytest.mark.parametrize(
    ("stable", "canary", "expected"),
    [
        (AB, AB, SAME),
        ([], [], SAME),
        (AB, [token("a"), token("c")], DIFFERENT),
        # Two tokens that both replicas find nearly equally likely.
        ([token("a", -0.70, b=-0.72)], [token("b", -0.70, a=-0.72)], TIE),
        ([token("a", -0.70, b=-0.72)], [token("b", -0.1, a=-2.4)], DIFFERENT),
        ([token("a")], [token("b", -0.70, a=-0.72)], DIFFERENT),
        ([token("a", -0.2, b=-2.0)], [token("b", -0.2, a=-2.0)], DIFFERENT),
        # What follows a near tie has another beginning and is not compared.
        ([token("a", -0.7, b=-0.7), token("c")], [token("b", -0.7, a=-0.7), token("d")], TIE),
        # Equal tokens with other probabilities.
        ([token("a", -0.1), token("b", -0.1)], [token("a", -0.6), token("b", -0.1)], DIFFERENT),
        ([token("a", -0.1), token("b", -0.1)], [token("a", -0.15), token("b", -0.1)], SAME),
        # One of them ended early.
        (AB, AB[:1], DIFFERENT),
        ([token("a"), token("b", -0.7)], AB[:1], TIE),
        (AB[:1], [token("a"), token("b", -0.7)], TIE),
    ],
)
def test_comparison(stable: list[Token], canary: list[Token], expected: Result) -> None:
    assert compare(stable, canary) is expected


tokens = st.lists(
    st.builds(token, st.sampled_from("abc"), st.floats(-5, 0), a=st.floats(-5, 0), b=st.floats(-5, 0)), max_size=8
)


@given(tokens, tokens)
def test_comparison_does_not_depend_on_the_order(one: list[Token], other: list[Token]) -> None:
    assert compare(one, other) is compare(other, one)
    assert compare(one, one) is SAME


@given(tokens, st.integers(0, 7), st.floats(-0.05, 0.05))
def test_batch_noise_is_not_a_difference(one: list[Token], place: int, noise: float) -> None:
    """Logprobs move a little, and a token with an equally likely other one may change places with it."""
    noisy = [Token(text=each.text, logprob=each.logprob + noise, top=each.top) for each in one]
    assert compare(one, noisy) is SAME
    if place < len(one):
        logprob = one[place].logprob
        tied = [*one[:place], Token(text="z", logprob=logprob, top={one[place].text: logprob})]
        noisy[place] = Token(text=one[place].text, logprob=logprob, top={"z": logprob})
        assert compare(noisy[: place + 1], tied) is TIE


CHAT_ANSWER = {
    "choices": [
        {"logprobs": {"content": [{"token": "a", "logprob": -1, "top_logprobs": [{"token": "b", "logprob": -2}]}]}}
    ]
}
TEXT_ANSWER = {"choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [-1], "top_logprobs": [{"b": -2}]}}]}


@pytest.mark.parametrize("answer", [CHAT_ANSWER, TEXT_ANSWER])
def test_answers_of_both_apis_are_read(answer: object) -> None:
    assert read_answer(json.dumps(answer).encode()) == (Token(text="a", logprob=-1, top={"b": -2}),)


@pytest.mark.parametrize("answer", [{}, [], {"choices": []}, {"choices": [{}]}, {"choices": [{"logprobs": {}}]}, "x"])
def test_answer_without_logprobs_is_not_compared(answer: object) -> None:
    assert read_answer(json.dumps(answer).encode()) is None
