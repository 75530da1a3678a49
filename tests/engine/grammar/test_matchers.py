"""Sequences follow their grammars through the scheduler: with overlap, preemption, swap, forks and cancellation."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.sampling_params import SamplingParams

Make = Callable[..., Any]
Grammar = Callable[..., str]

EOS, OTHER_EOS = 256, 257
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def params(grammar: str | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 120, "grammar": grammar, **options})


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_follow_their_grammars(make_constrained: Make, grammar: Grammar, overlap: bool) -> None:
    world = make_constrained(overlap=overlap)
    expected = {1: r"[a-c]{5}x", 2: r"(yes|no)", 3: r"[0-9]{2,4}!"}
    for key, pattern in expected.items():
        world.add(key, params(grammar("regex", pattern)), prompt=f"Prompt {key}")
    world.add(4, params(None, max_tokens=9, ignore_eos=True))
    world.wait_for_grammars(3)
    world.run()
    for key, pattern in expected.items():
        assert re.fullmatch(pattern, world.text(key)), world.text(key)
        assert world.finished[key].reason == "stop" and world.finished[key].stop_token_id in (EOS, OTHER_EOS)
    assert len(world.tokens[4]) == 9 and world.failed == {}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 24, "preemption_mode": "recompute"},
        {"num_blocks": 24, "preemption_mode": "swap", "num_swap_blocks": 64},
        {"num_blocks": 24, "preemption_mode": "recompute", "caching": False},
    ],
    ids=["recompute", "swap", "no-cache"],
)
def test_preempted_constrained_output_resumes_unchanged(
    make_constrained: Make, grammar: Grammar, overlap: bool, options: dict[str, Any]
) -> None:
    """Compare the tokens with those of an engine that has enough memory."""
    answers = []
    for chosen in ({}, options):
        world = make_constrained(overlap=overlap, **chosen)
        spec = grammar("regex", "[a-f]{25,40}[0-9]{3}")
        for key in range(1, 6):
            world.add(key, params(spec, max_tokens=60), prompt=f"A prompt number {key}")
        world.wait_for_grammars()
        world.run()
        assert world.failed == {}
        answers.append({key: world.tokens[key] for key in range(1, 6)})
    assert world.engine.counters.preemptions
    assert answers[0] == answers[1]
    assert all(re.fullmatch("[a-f]{25,40}[0-9]{3}", world.text(key)) for key in range(1, 6))


def test_answers_to_one_prompt_have_a_matcher_each(make_constrained: Make, grammar: Grammar) -> None:
    world = make_constrained()
    spec = grammar("json_schema", json.dumps(SCHEMA))
    world.add(1, params(spec), prompt="A shared prompt")
    for key in (2, 3):
        world.add(key, params(spec), prompt="A shared prompt", parent=1)
    world.wait_for_grammars()
    world.run()
    assert all(
        set(json.loads(world.text(key))) == {"name", "n"} for key in (1, 2, 3) if world.finished[key].reason == "stop"
    )
    assert world.failed == {}


def test_a_request_that_waits_for_its_grammar_delays_no_other(make_constrained: Make, grammar: Grammar) -> None:
    world = make_constrained()
    world.add(1, params(grammar("choice", '["a","b"]')))
    assert not world.engine.has_work
    world.add(2, params(None, max_tokens=3, ignore_eos=True))
    assert world.engine.gauges().num_waiting == 2
    world.run()
    assert list(world.finished) == [2]
    world.wait_for_grammars()
    world.run()
    assert world.text(1) in ("a", "b")


def test_compiled_grammar_is_reused_without_waiting(make_constrained: Make, grammar: Grammar) -> None:
    world = make_constrained()
    spec = grammar("choice", '["a","b"]')
    world.add(1, params(spec))
    world.wait_for_grammars()
    world.run()
    world.add(2, params(spec))
    assert world.engine.has_work
    world.run()
    assert world.text(2) in ("a", "b")


@pytest.mark.parametrize("while_compiling", [True, False])
def test_cancelled_request_frees_its_matcher(make_constrained: Make, grammar: Grammar, while_compiling: bool) -> None:
    world = make_constrained()
    world.add(1, params(grammar("regex", "[a-z]{50}")))
    if not while_compiling:
        world.wait_for_grammars()
        world.step()
    assert world.engine.cancel(1)
    if while_compiling:
        world.wait_for_grammars()
    world.run()
    assert not world.finished and not world.engine.has_work
    assert world.engine.gauges().num_waiting == world.engine.gauges().blocks_used == 0


@pytest.mark.parametrize(
    ("pattern", "options", "lengths"),
    [
        ("a*", {"min_tokens": 12}, range(12, 121)),
        ("a*", {"ignore_eos": True, "max_tokens": 20}, range(20, 21)),
        ("a{3}", {"ignore_eos": True}, range(3, 4)),
        ("a{3}", {"min_tokens": 10}, range(3, 4)),
        ("a{30}", {"max_tokens": 7}, range(7, 8)),
        ("[ab]*", {"stop_token_ids": (ord("b"),), "min_tokens": 5}, range(5, 121)),
    ],
)
def test_grammar_decides_when_output_ends(
    make_constrained: Make, grammar: Grammar, pattern: str, options: dict[str, Any], lengths: range
) -> None:
    """An answer ends no earlier than asked, unless the grammar allows nothing else."""
    world = make_constrained()
    for key in range(1, 5):
        world.add(key, params(grammar("regex", pattern), **options), prompt=f"Prompt {key}")
    world.wait_for_grammars()
    world.run()
    for key in range(1, 5):
        assert len(world.text(key)) in lengths
        assert re.fullmatch("[ab]*", world.text(key))


def test_a_token_outside_the_grammar_fails_only_its_request(make_constrained: Make, grammar: Grammar) -> None:
    world = make_constrained()
    world.add(1, params(grammar("regex", "[a-z]{20}")))
    world.add(2, params(grammar("regex", "[a-z]{20}")))
    world.wait_for_grammars()
    world.step()
    world.matchers.follow([1], [0])
    world.run()
    assert list(world.failed) == [1] and "grammar" in world.failed[1]
    assert re.fullmatch("[a-z]{20}", world.text(2))


def test_grammar_that_cannot_be_compiled_fails_its_request(make_constrained: Make) -> None:
    world = make_constrained()
    world.add(1, params("start: nothing"))
    world.wait_for_grammars()
    world.run()
    assert list(world.engine.take_failed() | world.failed) == [1]
    assert not world.engine.has_work
