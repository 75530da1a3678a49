"""The draw of a differential run, the joining of streams, and what counts as a deviation."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.serving.differential.__main__ import Compared, rows
from benchmarks.serving.differential.answers import Answer, events, joined, whole
from benchmarks.serving.differential.asked import COMPLETIONS, FAMILIES, Asked, Comparison, Limits, draw
from benchmarks.serving.differential.deviations import Deviation, deviations, parting

LIMITS = Limits(vocabulary=4096, context=2048)


def asked(comparison: Comparison = "equal", **fields: Any) -> Asked:
    return Asked(family="a family", path=COMPLETIONS, body=fields, comparison=comparison)


def answered(**choice: Any) -> Answer:
    return Answer(status=200, content={"id": "any", "choices": [choice], "usage": {"total_tokens": 3}})


def test_seed_gives_the_same_requests_in_every_family() -> None:
    drawn = draw(500, seed=1, limits=LIMITS)
    assert drawn == draw(500, seed=1, limits=LIMITS)
    assert drawn != draw(500, seed=2, limits=LIMITS)
    assert len(drawn) == 500
    families = Counter(each.family for each in drawn)
    assert len([family for family in families if families[family] >= 9]) == len(FAMILIES)
    assert all(isinstance(each.body, str) or json.dumps(each.body) for each in drawn)


@pytest.mark.parametrize(
    ("quire", "peer", "fields"),
    [
        ({"text": "a"}, {"text": "a"}, []),
        ({"text": "a"}, {"text": "b"}, ["choices[0].text"]),
        ({"text": "a", "stop_reason": None}, {"text": "a"}, []),
        ({"logprobs": {"token_logprobs": [-1.0]}}, {"logprobs": {"token_logprobs": [-1.001]}}, []),
        (
            {"logprobs": {"token_logprobs": [-1.0]}},
            {"logprobs": {"token_logprobs": [-1.1]}},
            ["choices[0].logprobs.token_logprobs[0]"],
        ),
        (
            {"logprobs": {"tokens": ["a"]}},
            {"logprobs": {"tokens": ["a", "b"]}},
            ["choices[0].logprobs.tokens"],
        ),
    ],
)
def test_results_are_compared_field_by_field(
    quire: Mapping[str, Any], peer: Mapping[str, Any], fields: list[str]
) -> None:
    found = deviations(asked(), answered(**quire), answered(**peer))
    assert [each.field for each in found] == fields


def test_sampled_output_is_compared_without_its_text() -> None:
    quire, peer = answered(text="a", finish_reason="length"), answered(text="b", finish_reason="stop")
    assert [each.field for each in deviations(asked("shape"), quire, peer)] == ["choices[0].finish_reason"]


def test_errors_are_compared_by_status_alone() -> None:
    quire, peer = Answer(status=400, message="no"), Answer(status=400, message="never")
    assert deviations(asked("status"), quire, peer) == []
    accepted = answered(text="a")
    assert deviations(asked("status"), quire, accepted) == [Deviation("status", "400 no", "200")]


@pytest.mark.parametrize(
    ("fields", "text", "obeys"),
    [
        ({"structured_outputs": {"choice": ["yes"]}}, "yes", True),
        ({"structured_outputs": {"choice": ["yes"]}}, "no", False),
        ({"structured_outputs": {"regex": "[0-9]{6}"}}, "123456", True),
        ({"structured_outputs": {"regex": "[0-9]{6}"}}, "12345a", False),
        ({"response_format": {}}, '{"name": "x", "age": 3}', True),
        ({"response_format": {}}, '{"name": "x"}', False),
        ({"response_format": {}}, '{"name": ', False),
    ],
)
def test_a_constrained_answer_must_be_valid(fields: Mapping[str, Any], text: str, obeys: bool) -> None:
    found = deviations(asked("valid", **fields), answered(text=text), answered(text="other"))
    assert (found == []) is obeys


def test_a_stream_is_joined_by_choice() -> None:
    lines = [
        {"choices": [{"index": 1, "text": "b"}], "usage": None},
        {"choices": [{"index": 0, "text": "a", "logprobs": {"tokens": ["a"]}}]},
        {"choices": [{"index": 0, "text": "c", "logprobs": {"tokens": ["c"]}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"total_tokens": 4}},
    ]
    body = "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + ": a comment\n\ndata: [DONE]\n\n"
    assert joined(200, events(body)).content == {
        "choices": [
            {"index": 0, "text": "ac", "logprobs": {"tokens": ["a", "c"]}, "finish_reason": "stop"},
            {"index": 1, "text": "b"},
        ],
        "usage": {"total_tokens": 4},
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": {"message": "wrong"}}', "wrong"),
        ('{"detail": "wrong"}', ""),
        ("a proxy's page", "a proxy's page"),
        ("[]", "[]"),
    ],
)
def test_the_message_of_an_error_is_found(body: str, message: str) -> None:
    assert whole(400, body) == Answer(status=400, message=message)


@pytest.mark.parametrize(
    ("other", "gap"),
    [(["a", "b"], None), (["a", "c"], 0.5), (["a", "d"], float("inf"))],
)
def test_greedy_outputs_are_compared_to_the_first_difference(other: list[str], gap: float | None) -> None:
    alternatives = [{"a": 0.0}, {"b": -1.0, "c": -1.5}]
    quire = answered(logprobs={"tokens": ["a", "b"], "top_logprobs": alternatives})
    peer = answered(logprobs={"tokens": other})
    assert parting(quire, peer) == gap


def test_deviations_are_grouped_by_family_and_field() -> None:
    def one(place: int, near: bool = False) -> Compared:
        found = (Deviation(f"choices[{place}].text", "a", "b"),)
        return Compared(asked=asked(), quire=answered(), peer=answered(), found=found, near_tie=near)

    assert rows([one(0), one(1), one(0, near=True)]) == [("a family", "choices.text", "2", "a", "b")]
