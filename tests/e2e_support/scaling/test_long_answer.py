"""A long answer is whole and right, or says where it is not."""

from collections.abc import Sequence
from typing import Any

import pytest

from e2e_support.scaling.long_answer import Cut, LongAnswer
from e2e_support.traffic.prompts import Kind, Prompt

KNOWN = (11, 12, 13)
WANTED = 5
PROMPT = Prompt(
    name="text-1",
    kind=Kind.LONG,
    text="once",
    messages=(),
    prompt_tokens=1,
    max_tokens=3,
    token_ids=KNOWN,
    answer=" upon a",
    finish_reason="length",
    margin=1.0,
    bfloat16_shift=0.0,
)


def chunk(*tokens: int, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"text": "…", "token_ids": list(tokens), "finish_reason": finish}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens}}


RIGHT = (chunk(11, 12), chunk(13, 80), chunk(81, finish="length"), usage(5))


def judged(events: Sequence[dict[str, Any]]) -> LongAnswer:
    answer = LongAnswer(PROMPT, WANTED)
    for event in events:
        answer.take(event)
    answer.end()
    return answer


def test_all_tokens_with_a_known_beginning_and_an_end_are_right():
    assert judged(RIGHT).tokens == WANTED


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (RIGHT[:1], "after 2 of 5 tokens it ended with finish_reason None"),
        ((*RIGHT[:2], chunk(finish="stop"), usage(4)), "finish_reason stop"),
        ((*RIGHT[:2], chunk(finish="length"), usage(5)), "5 tokens were asked for, 4 came, usage says 5"),
        (RIGHT[:3], "usage says None"),
        ((chunk(11, 13),), "token 1 is 13, right is 12"),
        ((*RIGHT[:3], chunk(82)), "more came after finish_reason length"),
        ((chunk(11), {"error": {"message": "the replica ends"}}), "after 1 tokens the server said"),
    ],
    ids=["broken off", "invented end", "a token short", "no usage", "a wrong token", "beyond its end", "error event"],
)
def test_anything_else_is_told(events, said):
    with pytest.raises(Cut, match=said):
        judged(events)


def test_it_asks_for_as_many_tokens_whatever_the_model_would_end_with():
    body = LongAnswer(PROMPT, WANTED).body("chat")
    assert (body["prompt"], body["max_tokens"], body["ignore_eos"]) == ("once", WANTED, True)
