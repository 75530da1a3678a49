"""Drafts of sequences with a grammar: the answers are those without drafts, and need fewer steps."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from fixed_drafts import use_every_draft

from quire_engine.core.sampling_params import ReasoningPhase, SamplingParams
from quire_engine.core.sequence import Sequence
from quire_engine.core.speculation.proposers import OpenProposer, Proposer
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StepCosts
from quire_engine.grammar.matchers import Matchers

Make = Callable[..., Any]
Grammar = Callable[..., str]
FREE = StepCosts(fixed=1.0, per_token=1e-9, per_pair=1e-9)
VOCAB_SIZE = 300
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["first", "second"]}, "n": {"type": "integer"}},
    "required": ["kind", "n"],
    "additionalProperties": False,
}


class Known:
    """A proposer that knows the answer; every ``wrong``-th token is another one, by ``off``."""

    def __init__(self, whole: list[int], wrong: int, off: int) -> None:
        self.whole, self.wrong, self.off = whole, wrong, off

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        begin = len(token_ids)
        following = enumerate(self.whole[begin : begin + most], start=begin)
        wrong = self.wrong
        return [(token + self.off) % VOCAB_SIZE if wrong and at % wrong == 0 else token for at, token in following]


def params(grammar: str | None, **options: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "grammar": grammar, **options})


def played(make: Make, requests: dict[int, SamplingParams], speculation: Speculation | None = None) -> Any:
    world = make(speculation=speculation, num_blocks=60)
    for key, each in requests.items():
        world.add(key, each, prompt="A prompt")
    grammars = {each.grammar for each in requests.values()} - {None}
    world.wait_for_grammars(len(grammars))
    world.run()
    return world


@pytest.mark.parametrize("wrong", [0, 3, 1])
@pytest.mark.parametrize("off", [1, 100])
def test_drafts_do_not_change_constrained_output(
    make_constrained: Make, grammar: Grammar, wrong: int, off: int
) -> None:
    """A wrong draft may be allowed by the grammar (the next byte) or not (a byte far away)."""
    patterns = {1: r"[a-f]{20}x", 2: r"(yes|no)", 3: r"[0-9]{12,24}!", 4: "json"}
    requests = {
        key: params(grammar("json_schema", json.dumps(SCHEMA)) if pattern == "json" else grammar("regex", pattern))
        for key, pattern in patterns.items()
    }
    requests[5] = params(None, max_tokens=20, ignore_eos=True)
    plain = played(make_constrained, requests)
    prompt = list(b"A prompt")

    def proposer(sequence: Sequence) -> Proposer:
        return Known([*prompt, *plain.tokens[sequence.key]], wrong, off)

    drafting = played(make_constrained, requests, Speculation(proposer, max_tokens=4, most_drafts=64, costs=FREE))
    assert drafting.tokens == plain.tokens and drafting.failed == {}
    assert all(re.fullmatch(pattern, drafting.text(key)) for key, pattern in patterns.items() if pattern != "json")
    counters = drafting.engine.counters
    assert counters.undrafted_sequences["grammar"] == 0
    assert counters.draft_tokens > 10  # the fewest where all are wrong
    if wrong == 1:
        assert counters.accepted_tokens == 0
    else:
        assert counters.steps < plain.engine.counters.steps * (0.5 if wrong == 0 else 0.8)


@pytest.mark.parametrize("wrong", [1, 3, 1000])
def test_masks_follow_the_drafts_of_a_runner(make_constrained: Make, grammar: Grammar, wrong: int) -> None:
    """The host learns the drafts of a draft model after the step was issued, and prepares masks then."""
    patterns = {1: r"[a-f]{20}x", 2: r"(yes|no)", 3: r"[ -~]{12,24}!", 4: r"[ -~\u0080-\u00ff]{40}"}
    requests = {key: params(grammar("regex", pattern)) for key, pattern in patterns.items()}
    requests[5] = params(None, max_tokens=40, ignore_eos=True)
    plain = played(make_constrained, requests)
    speculation = Speculation(
        lambda sequence: OpenProposer(), max_tokens=4, most_drafts=64, costs=FREE, seconds_per_pass=1e-9
    )
    use_every_draft(speculation)
    world = make_constrained(speculation=speculation, num_blocks=60, overlap=True)
    world.engine._runner.wrong_guesses = wrong
    for key, each in requests.items():
        world.add(key, each, prompt="A prompt")
    world.wait_for_grammars(len(patterns))
    world.run()
    assert world.tokens == plain.tokens and world.failed == {}
    counters = world.engine.counters
    assert counters.draft_tokens > 10 and (counters.accepted_tokens > 10) == (wrong > 1)


def test_drafts_pass_from_reasoning_into_a_grammar(make_constrained: Make, grammar: Grammar) -> None:
    """The tag that ends the reasoning may be a draft, and the grammar holds from the draft after it."""
    phase = ReasoningPhase(start_token_id=1, end_token_id=2, opened=True, budget=6)
    requests = {1: params(grammar("regex", "[a-f]{20}x"), reasoning_phase=phase)}
    plain = played(make_constrained, requests)

    def proposer(sequence: Sequence) -> Proposer:
        return Known([*b"A prompt", *plain.tokens[1]], 0, 0)

    drafting = played(make_constrained, requests, Speculation(proposer, max_tokens=4, most_drafts=64, costs=FREE))
    assert drafting.tokens == plain.tokens
    assert 2 in plain.tokens[1][:7]
    assert drafting.engine.counters.steps < plain.engine.counters.steps / 2


def test_masks_cover_drafts_up_to_the_first_invalid_one(make_constrained: Make, grammar: Grammar) -> None:
    world = make_constrained()
    matchers: Matchers = world.matchers
    spec = grammar("regex", "ab[0-9]")
    world.add(1, params(spec))
    world.wait_for_grammars()
    constrained = matchers._sequences[1]

    def allowed(mask: bytes | None) -> set[str]:
        assert mask is not None
        return {chr(token) for token in range(256) if mask[token // 8] >> token % 8 & 1}

    assert [allowed(mask) for mask in constrained.masks_along(list(b"ab"))] == [{"a"}, {"b"}, set("0123456789")]
    assert [allowed(mask) for mask in constrained.masks_along(list(b"axb"))] == [{"a"}, {"b"}]
    assert len(constrained.masks_along([])) == 1
    assert allowed(constrained.mask) == {"a"}, "the sequence stays where it is"
