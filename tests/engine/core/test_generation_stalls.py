"""Under the scheduler: those who decode never wait long for prompts, and prompts are finished all the same."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.stall_bound import StepCosts

Make = Callable[..., Any]
TOKEN = 0.001
"""Seconds that the fake runner says a token takes."""
COSTS = StepCosts(fixed=4 * TOKEN, per_token=0.5 * TOKEN, per_pair=1e-7 * TOKEN)
"""Half of what prompts really take, as on a machine that has become busier since the warm-up."""


def streaming(make_world: Make, *, max_stall: float, **shape: Any) -> Any:
    """Four sequences that decode for long, one step after their prompts."""
    here = make_world(
        num_blocks=600,
        budget=256,
        max_num_seqs=8,
        max_model_len=1500,
        caching=False,
        max_stall=max_stall,
        step_costs=COSTS,
        **shape,
    )
    here.runner.token_seconds = TOKEN
    for key in range(4):
        assert here.add(key, [key + 1] * 8, max_tokens=1400) is None
    while len(here.tokens) < 4 or here.engine.gauges().num_waiting:
        here.step()
    return here


def run_prompts(here: Any, prompts: dict[int, int], *, learnt: bool = True) -> list[int]:
    """Tokens of each step until all of them have drawn a token."""
    for key, length in prompts.items():
        assert here.add(key, [key % 40 + 1] * length, max_tokens=2) is None
    steps = []
    while not prompts.keys() <= here.tokens.keys():
        before = here.engine.counters.scheduled_tokens
        streams = [len(here.tokens[key]) for key in range(4)]
        here.step()
        steps.append(here.engine.counters.scheduled_tokens - before)
        if not here.engine._overlap:
            assert [len(here.tokens[key]) for key in range(4)] == [count + 1 for count in streams]
    return steps


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_steps_stay_within_the_bound_while_prompts_come(make_world: Make, policy: str, overlap: bool) -> None:
    here = streaming(make_world, max_stall=64 * TOKEN, policy=policy, overlap=overlap)
    run_prompts(here, {50: 400})  # from whose chunks the real cost is learnt
    steps = run_prompts(here, {51: 900, 52: 5, 53: 300})
    assert max(steps) <= 64
    assert sorted(steps)[len(steps) // 2] > 40, "the time that there is, is used"


def test_without_a_bound_a_step_takes_its_whole_budget(make_world: Make) -> None:
    here = streaming(make_world, max_stall=0.0)
    assert max(run_prompts(here, {51: 900})) == 256


def test_prompts_are_not_held_back_while_nobody_decodes(make_world: Make) -> None:
    here = make_world(num_blocks=600, budget=256, max_model_len=1500, max_stall=8 * TOKEN)
    here.runner.token_seconds = TOKEN
    assert here.add(1, [1] * 900, max_tokens=2) is None
    steps = []
    while 1 not in here.tokens:
        before = here.engine.counters.scheduled_tokens
        here.step()
        steps.append(here.engine.counters.scheduled_tokens - before)
    assert steps == [256, 256, 256, 132]


def test_however_slow_the_machine_every_step_takes_a_block_of_a_prompt(make_world: Make) -> None:
    here = streaming(make_world, max_stall=1e-6)
    steps = run_prompts(here, {51: 120, 52: 40})
    assert len(steps) <= 160 // 4 + 1 and min(steps) >= 4


def test_a_prompt_that_has_begun_is_finished_before_the_next_begins(make_world: Make) -> None:
    here = streaming(make_world, max_stall=40 * TOKEN)
    run_prompts(here, {50: 300, 51: 300, 52: 300})
    assert [key for key in here.tokens if key >= 50] == [50, 51, 52]
    assert here.engine.gauges().num_waiting == 0
