"""Speculation in the scheduler: answers stay the same, and the drafts follow what was learned."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire_engine.core.sampling_params import ReasoningPhase, SamplingParams
from quire_engine.core.sequence import Sequence as SequenceState
from quire_engine.core.speculation.proposers import NgramSettings, Proposer, ngram_proposers, why_not
from quire_engine.core.speculation.speculation import Speculation
from quire_engine.core.stall_bound import StepCosts

CHEAP = StepCosts(fixed=1.0, per_token=1e-6, per_pair=1e-9)
DEAR = StepCosts(fixed=1.0, per_token=1.0, per_pair=1e-9)


class Oracle:
    """A proposer that knows the answers, and is wrong at every ``wrong``-th position."""

    def __init__(self, answers: dict[int, list[int]], wrong: int = 0) -> None:
        self.answers = answers
        self.wrong = wrong

    def __call__(self, sequence: SequenceState) -> Proposer:
        whole = [*sequence.request.prompt_token_ids, *self.answers[sequence.key], *[1] * 16]
        return OracleOfOne(whole, self.wrong)


class OracleOfOne:
    def __init__(self, whole: list[int], wrong: int) -> None:
        self.whole, self.wrong = whole, wrong

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        assert token_ids == self.whole[: len(token_ids)]
        return [
            token + 1 if self.wrong and place % self.wrong == 0 else token
            for place, token in enumerate(self.whole[len(token_ids) : len(token_ids) + most], start=len(token_ids))
        ]


@pytest.fixture
def speculating(
    make_world: Callable[..., Any], expected_tokens: Callable[..., list[int]]
) -> Callable[..., tuple[Any, dict[int, list[int]]]]:
    """Return a function that gives a world with requests, and their expected answers."""

    def make(
        prompts: Sequence[list[int]],
        params: SamplingParams | Callable[[int], SamplingParams],
        *,
        wrong: int = 0,
        costs: StepCosts = CHEAP,
        max_tokens: int = 3,
        **world: Any,
    ) -> tuple[Any, dict[int, list[int]]]:
        own = params if callable(params) else lambda key: params
        expected = {
            key: expected_tokens(prompt, own(key), vocab_size=50, max_model_len=200)
            for key, prompt in enumerate(prompts)
        }
        speculation = Speculation(Oracle(expected, wrong), max_tokens=max_tokens, most_drafts=256, costs=costs)
        here = make_world(speculation=speculation, **world)
        for key, prompt in enumerate(prompts):
            assert here.add(key, prompt, params=own(key)) is None
        return here, expected

    return make


def plain(max_tokens: int = 40, **changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def test_accepted_drafts_save_steps(speculating: Callable[..., Any]) -> None:
    here, expected = speculating([[1, 2, 3]], plain(40))
    here.run()
    assert here.tokens == expected
    counters = here.engine.counters
    # The prompt's step samples one token, and two steps measure the time without drafts. The others sample four tokens
    # each; the last does not exceed the limit.
    assert counters.steps == 1 + 2 + 10
    assert (counters.accepted_tokens, counters.generation_tokens) == (27, 40)
    assert counters.accepted_by_position == [9, 9, 9]
    assert counters.num_drafts == 9 and counters.draft_tokens == 27
    assert counters.discarded_tokens == 0
    # As without drafts: the prompt, and every token but the last.
    assert counters.scheduled_tokens == 3 + 39


@pytest.mark.parametrize("wrong", [1, 2, 3, 5])
@pytest.mark.parametrize("windows", [(None,), (None, 5), (3, 8)])
def test_rejected_drafts_change_no_answer(speculating: Callable[..., Any], wrong: int, windows: tuple[Any]) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7], [1, 2, 3, 4, 5, 6]]
    here, expected = speculating(prompts, plain(50), wrong=wrong, windows=windows)
    here.run()
    assert here.tokens == expected
    counters = here.engine.counters
    assert counters.accepted_tokens < counters.draft_tokens
    assert counters.steps <= 52


def test_stop_token_among_drafts_ends_the_output(speculating: Callable[..., Any]) -> None:
    prompts = [[seed, 2, 3] for seed in range(1, 30)]
    here, expected = speculating(prompts, SamplingParams(max_tokens=60, stop_token_ids=(7, 8, 9)), num_blocks=200)
    here.run()
    assert here.tokens == expected
    assert any(ended.reason == "stop" for ended in here.finished.values())
    assert here.engine.counters.discarded_tokens > 0
    assert here.engine.counters.generation_tokens == sum(map(len, expected.values()))


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption_keeps_accepted_drafts(speculating: Callable[..., Any], mode: str) -> None:
    prompts = [list(range(key, key + 9)) for key in range(1, 7)]
    here, expected = speculating(
        prompts, plain(40), wrong=4, num_blocks=22, max_num_seqs=6, preemption_mode=mode, num_swap_blocks=40
    )
    here.run()
    assert here.tokens == expected
    counters = here.engine.counters
    assert sum(counters.preemptions.values()) > 0 and counters.accepted_tokens > 0
    assert (counters.swapped_in_blocks > 0) == (mode == "swap")


def test_accepted_tokens_are_found_as_prefixes(speculating: Callable[..., Any]) -> None:
    here, expected = speculating([[1, 2, 3, 4]], plain(40), wrong=3)
    here.run()
    text = [1, 2, 3, 4, *expected[0]]
    here.scheduler._speculation._proposers.answers[5] = []
    here.add(5, text, params=plain(1))
    here.run()
    # All full blocks of the text whose keys and values were computed.
    assert here.engine.counters.prefix_cache_hits == (len(text) - 1) // 4 * 4


def test_expensive_drafts_are_skipped_but_update_the_rate(speculating: Callable[..., Any]) -> None:
    here, expected = speculating([[1, 2, 3]], plain(30), costs=DEAR)
    here.run()
    assert here.tokens == expected
    counters = here.engine.counters
    assert counters.num_drafts == 0
    assert counters.undrafted_sequences == {"cost": 29}


@pytest.mark.parametrize(("costs", "pays"), [(CHEAP, True), (DEAR, False)])
def test_batches_flag_whether_to_prefill_for_drafts(
    speculating: Callable[..., Any], costs: StepCosts, pays: bool
) -> None:
    """At first they are, also while a step without drafts is measured; later they are if drafts pay."""
    world, _ = speculating([[1, 2, 3]] * 3, SamplingParams(max_tokens=12), costs=costs)
    found = []
    for _ in range(5):
        batch = world.scheduler.schedule()
        found.append(batch.prepares_drafts)
        world.scheduler.commit(batch, world.runner.execute(batch).sample().wait())
    assert found == [True, True, pays, pays, pays]


def test_lookups_become_rarer_in_texts_without_repetitions(make_world: Callable[..., Any]) -> None:
    """After eight looks in vain, every eighth step looks for a proposal."""
    found: list[int] = []

    class Recorded:
        def propose(self, token_ids: list[int], most: int) -> list[int]:
            found.append(len(token_ids))
            return []

    speculation = Speculation(lambda sequence: Recorded(), max_tokens=1, most_drafts=8, costs=CHEAP)
    here = make_world(speculation=speculation)
    here.add(0, [2], params=plain(42))
    here.run()
    assert 8 <= len(found) <= 10


def test_learned_costs_stop_and_start_drafts(speculating: Callable[..., Any]) -> None:
    here, _ = speculating([[1, 2, 3], [4, 5, 6]], plain(150), costs=CHEAP, wrong=2)
    here.runner.token_seconds = 1.0  # a step's time is its number of tokens
    here.run()
    counters = here.engine.counters
    assert counters.undrafted_sequences["cost"] > counters.num_drafts


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"temperature": 0.0}, None),
        ({"logprobs": 3}, None),
        ({"logit_bias": ((3, 1.0),)}, None),
        ({"allowed_token_ids": (1, 2)}, None),
        ({"prompt_logprobs": 1}, None),
        ({"grammar": "%llguidance {}"}, None),
        ({"reasoning_phase": ReasoningPhase(start_token_id=1, end_token_id=2, opened=True, budget=9)}, None),
        ({"presence_penalty": 0.5}, "penalties"),
        ({"frequency_penalty": -0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words_token_ids": ((1, 2),)}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
    ],
)
def test_logits_that_depend_on_the_answer_take_no_drafts(changes: dict[str, Any], reason: str | None) -> None:
    assert why_not(SamplingParams(max_tokens=9, **changes)) == reason


def test_sequences_without_drafts_are_counted_by_reason(speculating: Callable[..., Any]) -> None:
    here, expected = speculating([[1, 2, 3]], plain(20, presence_penalty=1.0))
    here.run()
    assert here.tokens == expected
    # One step measures the time without drafts.
    assert here.engine.counters.undrafted_sequences == {"cost": 1, "penalties": 18}


def test_drafts_take_no_blocks_needed_by_other_sequences(speculating: Callable[..., Any]) -> None:
    prompts = [[key, key + 1] for key in range(1, 5)]
    here, expected = speculating(prompts, plain(26), num_blocks=28, block_size=4)
    here.run()
    assert here.tokens == expected
    # 28 blocks hold the 4 x 28 tokens exactly: no sequence is preempted for a draft.
    assert not here.engine.counters.preemptions


def test_prompt_lookup_finds_repetitions(
    make_world: Callable[..., Any], expected_tokens: Callable[..., list[int]]
) -> None:
    """With two tokens of vocabulary, three recent ones have soon occurred before."""
    speculation = Speculation(
        ngram_proposers(NgramSettings(shortest=3, longest=6)), max_tokens=4, most_drafts=256, costs=CHEAP
    )
    here = make_world(vocab_size=2, speculation=speculation)
    chance = random.Random(3)
    for key in range(6):
        here.add(key, [chance.randrange(2) for _ in range(9)], params=plain(60))
    here.run()
    counters = here.engine.counters
    assert 0 < counters.accepted_tokens < counters.draft_tokens
    assert all(len(tokens) == 60 for tokens in here.tokens.values())
