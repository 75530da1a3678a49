"""Reasoning before an answer: its budget, and the grammar that begins after it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.sampling_params import ReasoningPhase, SamplingParams
from quire_engine.grammar.reasoning import ReasoningTracker, with_bits, without_bits

START, END, EOS, SIZE = 1, 2, 3, 64


def tracker(**options: Any) -> ReasoningTracker:
    return ReasoningTracker(
        ReasoningPhase(**{"start_token_id": START, "end_token_id": END, "opened": False, **options})
    )


def allowed(mask: bytes | None) -> set[int] | None:
    if mask is None:
        return None
    return {token for token in range(SIZE) if mask[token // 8] >> token % 8 & 1}


ANSWER = with_bits(bytes(SIZE // 8), [40, 41])
EVERY = set(range(SIZE))


@pytest.mark.parametrize(
    ("options", "tokens", "free", "constrained"),
    [
        ({}, [], None, {40, 41, START}),
        ({}, [START], None, EVERY - {EOS}),
        ({}, [START, 9, 9], None, EVERY - {EOS}),
        ({}, [START, 9, END], None, {40, 41}),
        ({}, [40], None, {40, 41}),
        ({"opened": True}, [], None, EVERY - {EOS}),
        ({"opened": True}, [9, END], None, {40, 41}),
        ({"optional": False}, [], None, {40, 41}),
        ({"opened": True, "budget": 0}, [], {END}, {END}),
        ({"opened": True, "budget": 2}, [9], None, EVERY - {EOS}),
        ({"opened": True, "budget": 2}, [9, 9], {END}, {END}),
        ({"opened": True, "budget": 2}, [9, 9, END], None, {40, 41}),
        ({"budget": 0}, [], None, {40, 41, START}),
        ({"budget": 0}, [START], {END}, {END}),
        ({"budget": 0}, [40], None, {40, 41}),
    ],
)
def test_masks_follow_the_reasoning(
    options: dict[str, Any], tokens: list[int], free: set[int] | None, constrained: set[int]
) -> None:
    here = tracker(**options)
    for token in tokens:
        here.follow(token)
    assert allowed(here.mask(None, SIZE, (EOS,))) == free
    assert allowed(here.mask(ANSWER, SIZE, (EOS,))) == constrained


def test_tags_are_not_counted() -> None:
    here = tracker()
    assert [here.follow(token) for token in (START, 9, 8, END, 9)] == [True, True, True, True, False]
    assert here.count == 2


def test_bits_beyond_a_mask_are_ignored() -> None:
    assert without_bits(b"\xff", [3, 900]) == b"\xf7"


THINK, DONE = ord("<"), ord(">")


def params(grammar: str | None, **phase: Any) -> SamplingParams:
    made = ReasoningPhase(**{"start_token_id": THINK, "end_token_id": DONE, "opened": True, **phase})
    return SamplingParams(max_tokens=90, grammar=grammar, reasoning_phase=made, ignore_eos=grammar is None)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_blocks": 30, "preemption_mode": "recompute"}], ids=["plain", "preempted"]
)
def test_the_grammar_begins_after_the_reasoning(
    make_constrained: Callable[..., Any], grammar: Callable[..., str], overlap: bool, options: dict[str, Any]
) -> None:
    world = make_constrained(overlap=overlap, **options)
    digits = grammar("regex", "[0-9]{3}!")
    world.add(1, params(digits, budget=7))
    world.add(2, params(digits, budget=0))
    world.add(3, params(digits, opened=False, optional=False))
    for key in (4, 5, 6):
        world.add(key, params(None, budget=5))
    world.wait_for_grammars()
    world.run()
    assert world.failed == {}
    tokens = world.tokens
    end = tokens[1].index(DONE)
    assert end <= 7 and not {256, 257} & set(tokens[1][:end])
    assert re.fullmatch(r"[0-9]{3}!", bytes(tokens[1][end + 1 : -1]).decode())
    assert tokens[2][0] == DONE and re.fullmatch(r"[0-9]{3}!", bytes(tokens[2][1:-1]).decode())
    assert re.fullmatch(r"[0-9]{3}!", world.text(3))
    assert all(DONE in tokens[key][:6] and len(tokens[key]) == 90 for key in (4, 5, 6))
    assert all(world.finished[key].reason == "stop" for key in (1, 2, 3))
    assert bool(options) == bool(world.engine.counters.preemptions)
