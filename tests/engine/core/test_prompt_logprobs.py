"""Logprobs of prompts: each position once, however the prompt is computed, and never many logits at a time."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quire_engine.core.batch import PromptPositions
from quire_engine.core.sampling_params import SamplingParams

World = Callable[..., Any]
PROMPT = list(range(1, 24))


def asking(**changes: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=1), **changes)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [4, 7, 64])
def test_each_prompt_token_but_the_first_is_reported_once(make_world: World, budget: int, overlap: bool) -> None:
    here = make_world(budget=budget, overlap=overlap)
    here.add(1, PROMPT, params=asking())
    here.add(2, PROMPT[:5], params=asking(prompt_logprobs=0))
    here.add(3, PROMPT)
    here.run()
    assert here.reported == {1: PROMPT[1:], 2: PROMPT[1:5]}


def test_a_prompt_of_one_token_has_nothing_to_report(make_world: World) -> None:
    here = make_world()
    here.add(1, [5], params=asking())
    here.run()
    assert here.reported == {} and len(here.tokens[1]) == 4


def test_cached_prefix_is_recomputed_if_its_logprobs_are_requested(make_world: World) -> None:
    here = make_world()
    for key, params in ((1, asking()), (2, asking()), (3, asking(prompt_logprobs=None))):
        here.add(key, PROMPT, params=params)
        here.run()
    assert here.reported == {1: PROMPT[1:], 2: PROMPT[1:]}
    assert [here.cached[key] for key in (1, 2, 3)] == [0, 0, 20]


def test_preemption_repeats_no_reported_token(make_world: World) -> None:
    here = make_world(num_blocks=9, budget=8, max_num_seqs=2)
    here.add(1, PROMPT[:9], max_tokens=20)
    here.add(2, PROMPT[9:20], params=asking(max_tokens=16))
    here.run()
    assert sum(here.engine.counters.preemptions.values()) > 0
    assert here.reported == {2: PROMPT[10:20]}


def test_logits_of_few_positions_are_computed_at_a_time(make_world: World) -> None:
    here = make_world(budget=64, positions=6)
    seen = here.record()
    for key in (1, 2):
        here.add(key, PROMPT, params=asking())
    here.add(3, PROMPT)
    here.run()
    counts = [sum(len(asked.next_token_ids) for asked in batch.prompt_logprobs) for batch in seen]
    # One more than allowed if every sequence gets its guaranteed token.
    assert max(counts) <= 7 and sum(counts) == 2 * (len(PROMPT) - 1)
    assert here.reported == {1: PROMPT[1:], 2: PROMPT[1:]}


def test_a_cancelled_prompt_reports_no_more(make_world: World) -> None:
    here = make_world(budget=4, overlap=True)
    here.add(1, PROMPT, params=asking())
    here.step()
    here.step()
    here.engine.cancel(1)
    here.run()
    assert len(here.reported[1]) < len(PROMPT) - 1


def test_missing_prompt_logprob_positions_are_detected(make_world: World) -> None:
    here = make_world(budget=64)
    here.add(1, PROMPT)
    batch = here.scheduler.schedule()
    beyond = PromptPositions(index=0, first=20, next_token_ids=[1, 2, 3, 4], num_logprobs=0)
    with pytest.raises(AssertionError, match="not computed now"):
        here.runner.execute(replace(batch, prompt_logprobs=[beyond]))
