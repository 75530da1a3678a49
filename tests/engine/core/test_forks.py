"""Answers to one prompt: it is computed once, whatever the cache, the chunks and the end of the first of them."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.stall_bound import StepCosts

World = Any
MakeWorld = Callable[..., World]
PROMPT = [place % 40 + 1 for place in range(1000)]


def fork(world: World, prompt: list[int], count: int, *, first: int = 1, **options: Any) -> None:
    for key in range(first, first + count):
        assert world.add(key, prompt, parent=first if key > first else None, **options) is None


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [2048, 300, 64])
@pytest.mark.parametrize("max_num_seqs", [16, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_eight_answers_compute_their_prompt_once(
    make_world: MakeWorld,
    expected_tokens: Callable[..., list[int]],
    caching: bool,
    budget: int,
    max_num_seqs: int,
    overlap: bool,
) -> None:
    world = make_world(
        num_blocks=200,
        block_size=16,
        budget=budget,
        max_num_seqs=max_num_seqs,
        caching=caching,
        overlap=overlap,
        max_model_len=1100,
    )
    fork(world, PROMPT, 8, max_tokens=5)
    world.run()
    # 62 full blocks are shared; each sequence computes the rest of the prompt.
    assert world.engine.counters.scheduled_tokens == 1000 + 7 * (1000 % 16) + 8 * 4
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    answer = expected_tokens(PROMPT, params, vocab_size=50, max_model_len=1100)
    assert all(world.tokens[key] == answer for key in range(1, 9))


@pytest.mark.parametrize("caching", [True, False])
def test_prompt_of_full_blocks_leaves_one_block_per_child(make_world: MakeWorld, caching: bool) -> None:
    world = make_world(num_blocks=200, block_size=16, budget=500, max_num_seqs=16, caching=caching, max_model_len=1100)
    fork(world, PROMPT[:960], 8, max_tokens=1)
    world.run()
    assert world.engine.counters.scheduled_tokens == 960 + 7 * 16


def test_forked_sequences_are_admitted_when_the_prompt_ends(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=60, budget=20, max_num_seqs=4)
    fork(world, PROMPT[:30], 3, max_tokens=2)
    world.add(4, [7, 7], max_tokens=2)
    gauges = world.engine.gauges()
    assert (gauges.num_waiting, gauges.queued_tokens, gauges.parked_tokens) == (4, 92, 60)
    first = world.step()
    assert first.first_scheduled_keys == [1]
    assert world.engine.gauges().num_waiting == 3
    # Ten tokens of the prompt are left; two children get two each, and those behind them get the rest.
    assert world.step().first_scheduled_keys == [2, 3, 4]
    world.run()


def test_windowed_prompt_blocks_are_shared(make_world: MakeWorld) -> None:
    """The window's blocks limit a chunk here, so some budget is left after an unfinished prompt."""
    world = make_world(windows=(None, 8), num_blocks=40, budget=100, max_num_seqs=4, caching=False)
    fork(world, PROMPT[:90], 3, max_tokens=2)
    world.run()
    assert world.engine.counters.scheduled_tokens == 90 + 2 * 2 + 3


def test_late_forked_sequence_shares_blocks_of_its_parent(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=60, budget=100, caching=False)
    world.add(1, PROMPT[:30], max_tokens=10)
    world.step()
    world.step()
    world.add(2, PROMPT[:30], max_tokens=2, parent=1)
    world.run()
    assert world.engine.counters.scheduled_tokens == 30 + 9 + 2 + 1


def test_finished_sequence_is_not_used_as_fork_parent(make_world: MakeWorld) -> None:
    world = make_world()
    world.add(1, [1, 2], max_tokens=1)
    world.run()
    world.add(2, [1, 2], max_tokens=1, parent=1)
    world.run()
    assert set(world.finished) == {1, 2}


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_forked_sequences_wait_for_a_preempted_parent(make_world: MakeWorld, mode: str) -> None:
    world = make_world(num_blocks=12, budget=4, max_num_seqs=4, caching=False, preemption_mode=mode, num_swap_blocks=20)
    world.add(9, [9, 9, 9], max_tokens=40)
    world.step()
    fork(world, PROMPT[:38], 2, max_tokens=2)
    for _ in range(12):
        world.step()
    assert sum(world.engine.counters.preemptions.values()) == 1 and world.engine.gauges().num_waiting == 2
    world.run()
    again = world.engine.counters.recomputed_tokens
    assert world.engine.counters.scheduled_tokens == 3 + 39 + 38 + 1 + 2 + 1 + again
    assert (again == 0) == (mode == "swap")


def test_forked_sequences_share_blocks_without_prefix_caching(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=100, budget=100, max_num_seqs=4, caching=False)
    fork(world, PROMPT[:30], 2, max_tokens=2)
    world.run()
    before = world.engine.counters.scheduled_tokens
    fork(world, PROMPT[:30], 2, first=11, max_tokens=2)
    world.add(20, PROMPT[:30], max_tokens=2)
    world.run()
    assert world.engine.counters.scheduled_tokens - before == (30 + 2 + 2) + (30 + 1)
    assert world.engine.counters.prefix_cache_queries == 0


def test_solitary_sequence_is_not_hashed_without_prefix_caching(make_world: MakeWorld) -> None:
    world = make_world(caching=False)
    world.add(1, PROMPT[:40], max_tokens=9)
    world.step()
    [sequence] = world.scheduler._running
    assert sequence.digests == [] and world.engine.gauges().blocks_cached == 0
    world.run()
    assert world.engine.gauges().blocks_cached == 0


def test_forked_sequences_are_admitted_after_a_deferred_prompt(make_world: MakeWorld) -> None:
    """Logprobs cut both prompts; the second one ends in a step that defers it behind the first one."""
    costs = StepCosts(fixed=0.004, per_token=0.0005, per_pair=1e-10)
    world = make_world(num_blocks=200, budget=64, positions=4, max_step=0.02, step_costs=costs, caching=False)
    world.runner.token_seconds = 0.001
    params = SamplingParams(max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    assert world.add(1, [1] * 40, params=params) is None
    world.step()
    fork(world, [2] * 6, 2, first=2, params=params)
    for _ in range(2):
        world.step()
    assert world.add(4, [4] * 3, max_tokens=2) is None  # both prompts are deferred for it
    world.run()  # each step checks the integrity
    assert len(world.tokens[2]) == len(world.tokens[3]) == 2
