"""A sequence that was swapped out returns without recomputation and frees its host blocks."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.sampling_params import SamplingParams

World = Any
MakeWorld = Callable[..., World]
Expected = Callable[..., list[int]]
TIGHT: dict[str, Any] = {"num_blocks": 12, "budget": 40, "max_num_seqs": 3, "preemption_mode": "swap"}


def step_until_preempted(world: World) -> None:
    for _ in range(200):
        world.step()
        if world.engine.counters.preemptions:
            return
    raise AssertionError("no sequence was preempted")


def step_until_swapped(world: World) -> Any:
    """Step until a sequence is swapped out, and return it."""
    step_until_preempted(world)
    [victim] = [sequence for sequence in world.scheduler._sequences.values() if sequence.swap_tables is not None]
    return victim


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (9,)])
def test_swapped_sequence_computes_nothing_again(
    make_world: MakeWorld, expected_tokens: Expected, overlap: bool, caching: bool, windows: tuple[int | None, ...]
) -> None:
    # With windows alone a sequence stays small: only a smaller one still grows into another's blocks.
    num_blocks, length = (12, 14) if None in windows else (6, 3)
    shape = {**TIGHT, "num_blocks": num_blocks}
    world = make_world(**shape, num_swap_blocks=20, overlap=overlap, caching=caching, windows=windows)
    prompts = {key: [key * 7 + place for place in range(length)] for key in (1, 2, 3)}
    for key, prompt in prompts.items():
        world.add(key, prompt, max_tokens=20)
    world.run()
    counters = world.engine.counters
    assert set(counters.preemptions) == {"swap:forced"}
    assert counters.scheduled_tokens == 3 * (length + 19) and counters.recomputed_tokens == 0
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for key, prompt in prompts.items():
        assert world.tokens[key] == expected_tokens(prompt, params, vocab_size=50, max_model_len=200)


def test_blocks_still_in_the_prefix_cache_are_not_copied_back(make_world: MakeWorld) -> None:
    copied = {}
    for caching in (True, False):
        world = make_world(**TIGHT, num_swap_blocks=20, caching=caching)
        world.add(1, [1] * 15, max_tokens=30)
        world.add(2, [2] * 15, max_tokens=30)
        world.add(3, [3] * 6, max_tokens=3)
        world.run()
        counters = world.engine.counters
        assert counters.scheduled_tokens == 15 + 29 + 15 + 29 + 6 + 2
        assert counters.preemptions["swap:forced"] > 0
        copied[caching] = counters.swapped_in_blocks
        assert copied[caching] == counters.swapped_out_blocks or caching
    assert copied[True] < copied[False]


def test_sequence_swapped_out_during_prefill_resumes_there(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=8, max_num_seqs=2, budget=4, preemption_mode="swap", num_swap_blocks=8, caching=False)
    world.add(1, [1, 1, 1], max_tokens=29)
    world.add(2, range(1, 22), max_tokens=2)
    victim = step_until_swapped(world)
    assert victim.key == 2 and 0 < victim.num_computed < 21
    world.run()
    assert world.engine.counters.scheduled_tokens == 3 + 28 + 21 + 1


def test_host_blocks_of_a_cancelled_sequence_are_free_at_once(make_world: MakeWorld) -> None:
    world = make_world(**TIGHT, num_swap_blocks=20)
    for key in (1, 2, 3):
        world.add(key, [key] * 14, max_tokens=20)
    victim = step_until_swapped(world)
    gauges = world.engine.gauges()
    assert (gauges.swap_blocks_total, gauges.swap_blocks_used) == (20, -(-victim.num_computed // 4))
    assert world.engine.cancel(victim.key)
    assert world.engine.gauges().swap_blocks_used == 0
    world.engine.check_integrity()
    world.run()
    assert set(world.finished) == {1, 2, 3} - {victim.key}


def test_stop_found_while_swapped_out_frees_the_host_blocks(make_world: MakeWorld, expected_tokens: Expected) -> None:
    """With overlap, the last sample of a victim is still in progress when it is swapped out."""
    prompts = {1: [1] * 14, 2: [2] * 14, 3: [3] * 14}
    calm = make_world(**{**TIGHT, "num_blocks": 64}, num_swap_blocks=20, overlap=True)
    for key, prompt in prompts.items():
        calm.add(key, prompt, max_tokens=20)
    calm.run()
    probe = make_world(**TIGHT, num_swap_blocks=20, overlap=True)
    for key, prompt in prompts.items():
        probe.add(key, prompt, max_tokens=20)
    victim = step_until_swapped(probe)
    # The token that it samples in the step in progress ends it; the second run is the same otherwise.
    last = calm.tokens[victim.key][victim.num_output - 1]
    assert last not in calm.tokens[victim.key][: victim.num_output - 1]
    world = make_world(**TIGHT, num_swap_blocks=20, overlap=True)
    for key, prompt in prompts.items():
        stops = (last,) if key == victim.key else ()
        world.add(key, prompt, params=SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=stops))
    step_until_preempted(world)
    assert world.finished[victim.key].stop_token_id == last
    assert world.engine.gauges().swap_blocks_used == 0 and world.engine.gauges().num_waiting == 0
    world.run()


def test_sequence_cancelled_before_its_copies_leaves_none(make_world: MakeWorld) -> None:
    """With overlap, a step may contain only a preemption: its copies run with the next step if still needed."""
    world = make_world(**TIGHT, num_swap_blocks=20, caching=False)
    for key in (1, 2):
        world.add(key, [key] * 14, max_tokens=20)
    world.step()
    scheduler = world.scheduler
    victim = scheduler._preemptor.preempt_last()
    assert world.engine.cancel(victim.key)
    batches = world.record()
    world.step()
    assert batches[0].swap_out == ()
    world.run()


@pytest.mark.parametrize(
    ("mode", "num_swap_blocks", "reason"),
    [
        ("recompute", 20, "recompute:forced"),
        ("recompute", 0, "recompute:forced"),
        ("swap", 20, "swap:forced"),
        ("swap", 2, "recompute:swap_space_full"),
        ("swap", 0, "recompute:no_swap_space"),
        ("auto", 0, "recompute:no_swap_space"),
        ("auto", 20, "recompute:not_measured"),
    ],
)
def test_preemptions_are_counted_by_reason(make_world: MakeWorld, mode: str, num_swap_blocks: int, reason: str) -> None:
    world = make_world(**{**TIGHT, "preemption_mode": mode}, num_swap_blocks=num_swap_blocks)
    for key in (1, 2, 3):
        world.add(key, [key] * 14, max_tokens=8)
    world.run()
    assert set(world.engine.counters.preemptions) == {reason}
    assert set(world.finished) == {1, 2, 3}


def test_evicted_prefix_is_not_found_by_a_swapped_sequence(make_world: MakeWorld) -> None:
    world = make_world(**TIGHT, num_swap_blocks=20)
    for key in (1, 2, 3):
        world.add(key, [key] * 14, max_tokens=20)
    victim = step_until_swapped(world)
    world.engine.forget_prefixes()
    world.run()
    world.add(9, [victim.key] * 14, max_tokens=1)
    world.run()
    assert world.cached[9] == 0
