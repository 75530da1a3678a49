"""The choice of the preemption mode, and the measurements behind it."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.core.batch import Batch, BlockCopies, RunnerOutput
from quire_engine.core.options import PreemptionMode
from quire_engine.core.preemption import SwapRoom, decide
from quire_engine.core.preemption_cost import Costs, MeasuredRates, PreemptionWork

MakeWorld = Callable[..., Any]
CHEAP_SWAP = Costs(recompute_seconds=2.0, swap_seconds=1.0)
CHEAP_RECOMPUTE = Costs(recompute_seconds=1.0, swap_seconds=2.0)


@pytest.mark.parametrize(
    ("mode", "room", "costs", "label"),
    [
        ("recompute", "enough", CHEAP_SWAP, "recompute:forced"),
        ("swap", "enough", CHEAP_RECOMPUTE, "swap:forced"),
        ("swap", "enough", None, "swap:forced"),
        ("swap", "full", CHEAP_SWAP, "recompute:swap_space_full"),
        ("swap", "none", CHEAP_SWAP, "recompute:no_swap_space"),
        ("auto", "enough", CHEAP_SWAP, "swap:cheaper"),
        ("auto", "enough", CHEAP_RECOMPUTE, "recompute:cheaper"),
        ("auto", "enough", None, "recompute:not_measured"),
        ("auto", "none", CHEAP_SWAP, "recompute:no_swap_space"),
        ("auto", "full", CHEAP_SWAP, "recompute:swap_space_full"),
        ("auto", "full", CHEAP_RECOMPUTE, "recompute:cheaper"),
    ],
)
def test_decision(mode: PreemptionMode, room: SwapRoom, costs: Costs | None, label: str) -> None:
    assert decide(mode, room=room, costs=costs).label == label


def batch(*, chunks: list[int], out: int = 0, into: int = 0) -> Batch:
    width = len(chunks)
    copies = [
        (BlockCopies(sources=[*range(count)], targets=[*range(count)]),) if count else () for count in (out, into)
    ]
    return Batch(
        step=1,
        rows=[*range(width)],
        num_computed=[0] * width,
        num_scheduled=chunks,
        token_ids=[0] * sum(chunks),
        samples=[True] * width,
        feedback_tokens=[],
        admitted=[],
        block_updates=(),
        released_rows=[],
        swap_out=copies[0],
        swap_in=copies[1],
    )


def test_costs_follow_from_the_start_values() -> None:
    rates = MeasuredRates(seconds_per_token=0.01, swap_bytes_per_second=1000.0, block_bytes=(50, 10))
    costs = rates.costs(PreemptionWork(tokens=200, blocks_out=(4, 2), blocks_in=(3, 2)))
    assert costs is not None
    assert costs.recompute_seconds == pytest.approx(2.0)
    assert costs.swap_seconds == pytest.approx((4 * 50 + 2 * 10 + 3 * 50 + 2 * 10) / 1000)


@pytest.mark.parametrize(
    "missing",
    [
        {"seconds_per_token": None},
        {"swap_bytes_per_second": None},
        {"block_bytes": ()},
    ],
)
def test_costs_are_unknown_until_every_rate_is_measured(missing: dict[str, Any]) -> None:
    known = {"seconds_per_token": 1.0, "swap_bytes_per_second": 1.0, "block_bytes": (1,)}
    assert (
        MeasuredRates(**{**known, **missing}).costs(PreemptionWork(tokens=1, blocks_out=(1,), blocks_in=(1,))) is None
    )


@pytest.mark.parametrize(
    ("chunks", "seconds", "learnt"),
    [
        pytest.param([400], 4.0, 0.01, id="a prompt"),
        pytest.param([391, *[1] * 9], 4.0, 0.01, id="a prompt and some who decode"),
        pytest.param([100, *[1] * 300], 4.0, None, id="many who decode and a short prompt"),
        pytest.param([20], 4.0, None, id="too few tokens to tell"),
        pytest.param([1] * 400, 4.0, None, id="all decode"),
        pytest.param([400], 0.0, None, id="a runner that does not say"),
    ],
)
def test_prefill_rate_is_measured_in_prefill_steps(chunks: list[int], seconds: float, learnt: float | None) -> None:
    rates = MeasuredRates()
    output = RunnerOutput(token_ids=[], run_seconds=seconds)
    rates.observe_step(batch(chunks=chunks), output, prompt_tokens=sum(count for count in chunks if count > 1))
    assert rates.seconds_per_token == (None if learnt is None else pytest.approx(learnt))


def test_copy_rate_is_measured_from_copies() -> None:
    rates = MeasuredRates(block_bytes=(100,))
    rates.observe_step(batch(chunks=[1], out=3, into=2), RunnerOutput(token_ids=[], swap_seconds=5.0), prompt_tokens=0)
    assert rates.seconds_per_byte == pytest.approx(0.01)
    rates.observe_step(batch(chunks=[1]), RunnerOutput(token_ids=[], swap_seconds=5.0), prompt_tokens=0)
    assert rates.seconds_per_byte == pytest.approx(0.01)


def test_newer_measurements_count_for_more() -> None:
    rates = MeasuredRates(seconds_per_token=0.1)
    for _ in range(30):
        rates.observe_step(batch(chunks=[100]), RunnerOutput(token_ids=[], run_seconds=1.0), prompt_tokens=100)
    assert rates.seconds_per_token == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(("block_seconds", "kind"), [(0.5, "swap:cheaper"), (50.0, "recompute:cheaper")])
def test_auto_chooses_the_mode_measured_as_cheaper(make_world: MakeWorld, block_seconds: float, kind: str) -> None:
    rates = MeasuredRates(seconds_per_token=1.0, swap_bytes_per_second=1.0 / block_seconds, block_bytes=(1,))
    world = make_world(num_blocks=12, budget=40, max_num_seqs=3, num_swap_blocks=20, rates=rates)
    for key in (1, 2, 3):
        world.add(key, [key] * 14, max_tokens=8)
    world.run()
    assert set(world.engine.counters.preemptions) == {kind}


def test_auto_switches_to_recompute_if_copies_are_slow(make_world: MakeWorld) -> None:
    rates = MeasuredRates(seconds_per_token=1.0, swap_bytes_per_second=10.0, block_bytes=(1,))
    world = make_world(num_blocks=12, budget=40, max_num_seqs=3, num_swap_blocks=20, rates=rates, caching=False)
    world.runner.copy_seconds = 100.0
    for key in range(1, 9):
        world.add(key, [key] * 14, max_tokens=20)
    world.run()
    preemptions = world.engine.counters.preemptions
    assert preemptions["swap:cheaper"] == 1 and preemptions["recompute:cheaper"] >= 1


def test_shared_blocks_are_not_counted_as_lost(make_world: MakeWorld) -> None:
    world = make_world(num_blocks=30, budget=60, max_num_seqs=2)
    world.add(1, [1] * 18, max_tokens=8)
    world.add(2, [1] * 18, max_tokens=8)
    world.step()
    victim = world.scheduler._running[-1]
    # Four blocks of the prompt are shared, the fifth is not.
    assert world.scheduler._kv.prepare_to_lose(victim) == PreemptionWork(tokens=2, blocks_out=(5,), blocks_in=(1,))
    world.run()
