"""The contents of a step: budget, order, admission, preemption, cancellation, rejection."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from fake_runner import draw

from quire_engine.core.batch import Batch, TokenMasks, mask_bytes
from quire_engine.core.sampling_params import SamplingParams

World = Any
MakeWorld = Callable[..., World]


def steps_of(world: World) -> list[Batch]:
    """Run to the end and return the batches."""
    batches: list[Batch] = world.record()
    world.run()
    return batches


def counts(batches: list[Batch]) -> list[list[int]]:
    return [batch.num_scheduled for batch in batches]


def test_long_prompt_is_computed_in_chunks_of_the_budget(make_world: MakeWorld) -> None:
    world = make_world(budget=8)
    world.add(1, [1] * 19, max_tokens=3)
    batches = steps_of(world)
    assert counts(batches) == [[8], [8], [3], [1], [1]]
    assert [batch.samples for batch in batches] == [[False], [False], [True], [True], [True]]
    assert [batch.num_computed for batch in batches] == [[0], [8], [16], [19], [20]]


def test_long_prompt_leaves_a_token_for_each_behind_it(make_world: MakeWorld) -> None:
    world = make_world(budget=8, max_num_seqs=3, policy="priority")
    world.add(1, [1], max_tokens=6, priority=1)
    world.add(2, [2], max_tokens=6, priority=1)
    world.step()
    world.add(3, [3] * 17, max_tokens=1, priority=0)
    # It was admitted with the remaining budget, comes first from then on, and needs more than the budget.
    assert counts(steps_of(world))[:4] == [[1, 1, 6], [6, 1, 1], [5, 1, 1], [1, 1]]


def test_decoding_continues_in_every_step_of_a_long_prompt(make_world: MakeWorld) -> None:
    world = make_world(budget=8, max_num_seqs=3)
    world.add(1, [1, 2], max_tokens=12)
    world.step()
    world.add(2, [5] * 40, max_tokens=1)
    batches = steps_of(world)
    assert counts(batches)[:6] == [[1, 7]] * 5 + [[1, 5]]


def test_remaining_budget_goes_to_waiting_requests(make_world: MakeWorld) -> None:
    world = make_world(budget=8)
    for key in range(3):
        world.add(key, [key + 1] * 3, max_tokens=2)
    assert counts(steps_of(world)) == [[3, 3, 2], [1, 1, 1], [1]]


def test_row_of_a_finished_sequence_is_reused_in_the_next_step(make_world: MakeWorld) -> None:
    world = make_world(max_num_seqs=2)
    world.add(1, [1, 1], max_tokens=2)
    world.add(2, [2, 2], max_tokens=5)
    world.add(3, [3, 3], max_tokens=2)
    batches = steps_of(world)
    assert [len(batch.rows) for batch in batches] == [2, 2, 2, 2, 1]
    assert batches[2].released_rows == [batches[2].admitted[0].row] == [0]


def test_prompt_waits_until_all_of_it_fits(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=10, budget=40, caching=False)
    world.add(1, [1] * 20, max_tokens=3)
    world.add(2, [2] * 22, max_tokens=1)
    batches = steps_of(world)
    assert [len(batch.admitted) for batch in batches] == [1, 0, 0, 1]
    assert not world.engine.counters.preemptions


def test_first_queued_request_is_never_overtaken(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=10, budget=40, caching=False)
    world.add(1, [1] * 20, max_tokens=3)
    world.add(2, [2] * 30, max_tokens=1)
    world.add(3, [3], max_tokens=1)
    order = [ended for batch in steps_of(world) for ended in batch.admitted]
    assert [len(admission.prompt_token_ids) for admission in order] == [20, 30, 1]


def test_cached_prefix_reduces_blocks_needed_for_admission(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=12, budget=60)
    prompt = [*range(1, 30)]
    world.add(1, prompt, max_tokens=4)
    world.step()
    world.add(2, prompt, max_tokens=4)
    world.step()
    # Eight blocks each would not fit if seven of them were not shared.
    assert world.engine.gauges().num_running == 2


def test_prompts_leave_one_percent_of_blocks_free(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=200, budget=2000, max_model_len=1000, caching=False)
    world.add(1, [1] * 400, max_tokens=8)
    world.add(2, [2] * (400 - 4), max_tokens=8)
    world.step()
    assert world.engine.gauges().num_running == 1
    world.add(3, [3], max_tokens=1)
    alone = make_world(num_blocks=200, budget=2000, max_model_len=1000, caching=False)
    alone.add(1, [1] * 799, max_tokens=2)
    alone.step()
    assert alone.engine.gauges().num_running == 1


@pytest.mark.parametrize(
    ("policy", "priorities", "victim"),
    [
        pytest.param("fcfs", (0, 0, 0), 3, id="the last to arrive"),
        pytest.param("fcfs", (0, 9, 0), 3, id="fcfs does not look at priorities"),
        pytest.param("priority", (0, 9, 0), 2, id="the lowest priority"),
        pytest.param("priority", (9, 9, 0), 2, id="of one priority the last to arrive"),
    ],
)
def test_preemption_chooses_the_victim_by_policy(
    make_world: MakeWorld, policy: str, priorities: tuple[int, ...], victim: int
) -> None:
    world = make_world(num_blocks=12, budget=40, policy=policy, caching=False)
    for key, priority in enumerate(priorities, start=1):
        world.add(key, [key] * 14, max_tokens=8, priority=priority)
    world.run()
    preempted = [key for key, sequence in world.sequences.items() if sequence.num_preemptions]
    assert preempted == [victim]
    assert world.engine.counters.preemptions == {"recompute:no_swap_space": 1}


def test_preempted_sequence_resumes_at_its_position(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=12, budget=40, max_num_seqs=2, caching=False)
    world.add(1, [1] * 15, max_tokens=20)
    world.add(2, [2] * 15, max_tokens=20)
    again = [admission for batch in steps_of(world)[1:] for admission in batch.admitted]
    assert len(again) == 1 and len(again[0].prompt_token_ids) == 15
    assert again[0].output_token_ids == world.tokens[2][: len(again[0].output_token_ids)] != []


def test_no_request_is_admitted_in_a_step_that_preempted(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=12, budget=40, max_num_seqs=2, caching=False, policy="priority")
    world.add(1, [1] * 15, max_tokens=20)
    world.add(2, [2] * 15, max_tokens=20, priority=1)
    world.step()
    world.add(3, [3], max_tokens=2)
    batches = world.record()
    while not world.engine.counters.preemptions:
        world.step()
    # A row and blocks are free, and there is budget.
    gauges = world.engine.gauges()
    assert (gauges.num_running, gauges.num_waiting) == (1, 2)
    assert gauges.blocks_used < gauges.blocks_total
    assert not batches[-1].admitted and batches[-1].released_rows == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_cancelled_sequence_frees_its_blocks_at_once(make_world: MakeWorld, overlap: bool) -> None:
    world = make_world(num_blocks=8, budget=40, overlap=overlap)
    world.add(1, [1] * 20, max_tokens=10)
    world.add(2, [2] * 20, max_tokens=10)
    world.step()
    world.step()
    assert world.engine.gauges().num_waiting == 1
    assert world.engine.cancel(1)
    assert world.engine.gauges().blocks_used == 0
    world.step()
    assert world.engine.gauges().num_running == 1
    world.run()
    assert set(world.finished) == {2}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (199, 1, None),
        (200, 1, "the prompt has 200 tokens; this model takes at most 199"),
        (
            30,
            20,
            "the prompt of 30 tokens and its answer come to 50 tokens; the KV cache holds 41, so max_tokens of at",
        ),
        (30, 12, "max_tokens of at most 11 would fit"),
        (30, 11, None),
        (41, 1, "no answer would fit"),
    ],
)
def test_request_that_never_fits_is_refused_with_the_maximum(
    make_world: MakeWorld, prompt: int, max_tokens: int, message: str | None
) -> None:
    world = make_world(num_blocks=10 if prompt < 100 else 64, budget=60, max_model_len=200)
    refusal = world.add(1, [1] * prompt, max_tokens=max_tokens)
    if message is None:
        assert refusal is None
        world.run()
        assert len(world.tokens[1]) == max_tokens
    else:
        assert message in refusal
        assert not world.engine.has_work


def test_windowed_cache_serves_sequences_longer_than_itself(make_world: MakeWorld) -> None:
    world = make_world(windows=(8,), num_blocks=5, budget=40, max_model_len=100)
    world.add(1, [1] * 60, max_tokens=30)
    world.run()
    assert len(world.tokens[1]) == 30


def test_windowed_group_smaller_than_its_window_is_refused(make_world: MakeWorld) -> None:
    with pytest.raises(ValueError, match="smaller than its window"):
        make_world(windows=(16,), num_blocks=4, block_size=4)


def test_blocks_that_left_the_window_are_free(make_world: MakeWorld) -> None:
    world = make_world(windows=(None, 8), num_blocks=30, max_model_len=100, caching=False)
    world.add(1, [1] * 10, max_tokens=60)
    for _ in range(50):
        world.step()
    full, windowed = world.scheduler._kv.pools
    assert full.num_used == 15
    assert windowed.num_used <= 3


def test_overlapped_step_feeds_sampled_tokens_back(make_world: MakeWorld) -> None:
    world = make_world(overlap=True)
    world.add(1, [1, 2, 3], max_tokens=4)
    batches = steps_of(world)
    assert [batch.feedback_tokens for batch in batches] == [[], [0], [0], [0]]
    assert [batch.token_ids for batch in batches] == [[1, 2, 3], [0], [0], [0]]
    assert world.engine.counters.discarded_tokens == 0  # the end by length is known in advance


def test_stop_found_one_step_late_discards_one_token(
    make_world: MakeWorld, expected_tokens: Callable[..., list[int]]
) -> None:
    params = SamplingParams(max_tokens=50)
    world = make_world(overlap=True, vocab_size=6)
    world.add(1, [3, 1], params=params)
    world.run()
    assert world.finished[1].reason == "stop" and world.finished[1].stop_token_id == 0
    assert world.tokens[1] == expected_tokens([3, 1], params, vocab_size=6, max_model_len=200)
    assert world.engine.counters.discarded_tokens == 1


def test_third_step_in_flight_raises_an_assertion(make_world: MakeWorld) -> None:
    world = make_world()
    world.add(1, [1, 2], max_tokens=9)
    world.scheduler.schedule()
    world.scheduler.schedule()
    with pytest.raises(AssertionError, match="too far ahead"):
        world.scheduler.schedule()


def calls_of_a_step(world: World) -> int:
    """Return the number of Python calls in one schedule(), which does not depend on the machine."""
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # A garbage collection would count too, because hypothesis hooks into it.
    gc.disable()
    sys.setprofile(count)
    try:
        world.scheduler.schedule()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def test_step_cost_is_independent_of_the_queue_length(make_world: MakeWorld) -> None:
    costs = []
    for queued in (1, 5000):
        world = make_world(num_blocks=20, max_num_seqs=4, budget=64)
        world.add(0, [1] * 40, max_tokens=20)
        for key in range(1, queued + 1):
            world.add(key, [2] * 50, max_tokens=5)
        world.step()
        world.step()
        costs.append(calls_of_a_step(world))
    assert costs[0] == costs[1]


def test_queue_head_is_not_looked_up_before_blocks_are_freed(make_world: MakeWorld) -> None:
    costs = []
    for length in (40, 150):
        world = make_world(num_blocks=50, max_num_seqs=4, budget=200)
        prompt = [1] * 30 + [2] * 130
        world.add(0, prompt, max_tokens=20)
        world.add(1, prompt[:length] + [7] * 45, max_tokens=5)
        world.step()
        world.step()
        assert world.engine.gauges().num_waiting == 1
        costs.append(calls_of_a_step(world))
    assert costs[0] == costs[1]


def test_gauges_count_sequences_and_blocks(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=10, budget=40, max_num_seqs=1, caching=False)
    world.add(1, [1] * 9, max_tokens=5)
    world.add(2, [2] * 7, max_tokens=5)
    world.step()
    gauges = world.engine.gauges()
    assert (gauges.num_running, gauges.num_waiting, gauges.queued_tokens) == (1, 1, 7)
    assert (gauges.blocks_total, gauges.blocks_used, gauges.kv_usage) == (10, 3, 0.3)
    assert gauges.kv_slots_wasted == 3


def test_prefilling_tokens_are_the_missing_prompt_tokens(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=60, budget=20, max_num_seqs=2)
    world.add(1, [1] * 5, max_tokens=9)
    world.add(2, [2] * 50, max_tokens=9)
    told = []
    for _ in range(4):
        told.append(world.engine.gauges().prefilling_tokens)
        world.step()
    # The first takes 5 of 20 in the first step, and one token in each step after it.
    assert told == [0, 35, 16, 0]


def test_first_scheduled_requests_are_named_once(make_world: MakeWorld) -> None:
    world = make_world(budget=4, max_num_seqs=2)
    world.add(7, [1] * 9, max_tokens=2)
    world.add(8, [1] * 2, max_tokens=2)
    named = []
    while world.engine.has_work:
        named.append(world.step().first_scheduled_keys)
    assert named == [[7], [], [8], []] or named == [[7], [], [8], [], []]


@pytest.mark.parametrize("at_once", [2, 3, 7])
def test_step_may_sample_several_tokens_for_a_sequence(
    make_world: MakeWorld, expected_tokens: Callable[..., list[int]], at_once: int
) -> None:
    """The later ones are computed together in the next step, as decoding and not as a prompt."""
    world = make_world(tokens_at_once=at_once, max_num_seqs=3, budget=24, step_costs=None, max_stall=0.001)
    prompts = {1: [5, 6, 7], 2: [8] * 9, 3: [9]}
    for key, prompt in prompts.items():
        assert world.add(key, prompt, max_tokens=20) is None
    batches = steps_of(world)
    for key, prompt in prompts.items():
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        assert world.tokens[key] == expected_tokens(prompt, params, vocab_size=50, max_model_len=200)
    assert batches[-1].num_scheduled == [at_once] * 3
    assert world.engine.counters.generation_tokens == 60
    assert world.engine.counters.discarded_tokens == 3 * (-20 % at_once)
    assert world.engine.gauges().prefilling_tokens == 0


def test_tokens_after_a_stop_token_of_the_same_step_are_dropped(
    make_world: MakeWorld, expected_tokens: Callable[..., list[int]]
) -> None:
    plain = SamplingParams(max_tokens=12, ignore_eos=True)
    said = expected_tokens([5, 6], plain, vocab_size=50, max_model_len=200)
    stop = next(token for place, token in enumerate(said) if place % 4 == 1 and token not in said[:place])
    world = make_world(tokens_at_once=4)
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,), logprobs=1)
    assert world.add(1, [5, 6], params=params) is None
    world.run()
    assert world.tokens[1] == said[: said.index(stop) + 1]
    assert (world.finished[1].reason, world.finished[1].stop_token_id) == ("stop", stop)
    assert world.engine.counters.discarded_tokens == 2


def test_masks_are_applied_between_forward_and_sampling(make_world: MakeWorld) -> None:
    world = make_world()
    for key in (1, 2):
        assert world.add(key, [key, 3], max_tokens=4) is None
    batch = world.scheduler.schedule()
    forward = world.runner.execute(batch)
    with pytest.raises(AssertionError, match="not sampled"):
        world.runner.execute(batch)
    bits = (1 << 30).to_bytes(mask_bytes(50), "little")
    plain = [draw(digest, 50) for digest in forward.digests]
    output = forward.sample(TokenMasks(places=[1], bits=bits)).wait()
    assert output.token_ids == [plain[0], 30] and plain[1] != 30
