"""The stall bound under the scheduler: running sequences never wait long for prompts, and prompts still finish."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from statistics import median
from typing import Any

import pytest

from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request
from quire_engine.core.stall_bound import MAX_STEP_SECONDS, StallBound, StepCosts

Make = Callable[..., Any]
TOKEN = 0.001
"""The seconds per token that the fake runner reports."""
COSTS = StepCosts(fixed=4 * TOKEN, per_token=0.5 * TOKEN, per_pair=1e-7 * TOKEN)
"""Half of the actual cost of prompts, as on a machine that became busier after the warm-up."""


def streaming(make_world: Make, *, max_stall: float, **shape: Any) -> Any:
    """Return four sequences that decode for long, one step after their prompts."""
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


def run_prompts(here: Any, prompts: dict[int, int]) -> list[int]:
    """Return the tokens of each step until all sequences have sampled a token."""
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
def test_steps_stay_within_the_bound_during_prefill(make_world: Make, policy: str, overlap: bool) -> None:
    here = streaming(make_world, max_stall=64 * TOKEN, policy=policy, overlap=overlap)
    run_prompts(here, {50: 400})  # the actual cost is learned from their chunks
    steps = run_prompts(here, {51: 900, 52: 5, 53: 300})
    assert max(steps) <= 64
    assert sorted(steps)[len(steps) // 2] > 40, "the time that there is, is used"


def test_step_without_stall_bound_uses_the_whole_token_budget(make_world: Make) -> None:
    here = streaming(make_world, max_stall=0.0)
    assert max(run_prompts(here, {51: 900})) == 256


def test_prompts_use_the_whole_budget_if_no_sequence_decodes(make_world: Make) -> None:
    here = make_world(num_blocks=600, budget=256, max_model_len=1500, max_stall=8 * TOKEN)
    here.runner.token_seconds = TOKEN
    assert here.add(1, [1] * 900, max_tokens=2) is None
    steps = []
    while 1 not in here.tokens:
        before = here.engine.counters.scheduled_tokens
        here.step()
        steps.append(here.engine.counters.scheduled_tokens - before)
    assert steps == [256, 256, 256, 132]


def test_every_step_computes_a_block_on_any_machine(make_world: Make) -> None:
    here = streaming(make_world, max_stall=1e-6)
    steps = run_prompts(here, {51: 120, 52: 40})
    assert len(steps) <= 160 // 4 + 1 and min(steps) >= 4


def test_started_prompt_is_finished_before_the_next_one(make_world: Make) -> None:
    here = streaming(make_world, max_stall=40 * TOKEN)
    run_prompts(here, {50: 300, 51: 300, 52: 300})
    assert [key for key in here.tokens if key >= 50] == [50, 51, 52]
    assert here.engine.gauges().num_waiting == 0


def slow_world(make_world: Make, **shape: Any) -> Any:
    """Return a machine on which a prompt token takes 20 ms and the weights half a second: a 5B model on two cores."""
    costs = StepCosts(fixed=0.5, per_token=0.02, per_pair=1e-9)
    return make_world(
        num_blocks=1000,
        block_size=16,
        budget=2048,
        max_model_len=6000,
        max_stall=0.25,
        max_step=MAX_STEP_SECONDS,
        step_costs=costs,
        **shape,
    )


@dataclass(frozen=True)
class Timed:
    """A forward pass that reports a given duration."""

    forward: Any
    seconds: float

    def sample(self, masks: object = None) -> Any:
        pending = self.forward.sample(masks)
        return replace(pending, output=replace(pending.output, run_seconds=self.seconds))


def clocked(here: Any, until: Callable[[], bool]) -> list[float]:
    """Return the seconds of each step until then, on a fake clock, by the costs of the world's machine."""
    seconds: list[float] = []

    class Clocked:
        def execute(self, batch: Batch) -> Any:
            prompts = sum(count for count in batch.num_scheduled if count > 1)
            seconds.append(0.5 + 0.02 * prompts)
            return Timed(runner.execute(batch), seconds[-1])

    runner, here.engine._runner = here.engine._runner, Clocked()
    while not until():
        assert here.engine.has_work
        here.step()
    here.engine._runner = runner
    return seconds


def test_prefill_steps_are_bounded_if_no_sequence_decodes(make_world: Make) -> None:
    """4,000 tokens would take 41 s in one step, which would delay every request that arrives in the meantime."""
    here = slow_world(make_world)
    assert here.add(1, [1] * 4000, max_tokens=2) is None
    seconds = clocked(here, lambda: 1 in here.tokens)
    assert max(seconds) <= MAX_STEP_SECONDS
    assert sorted(seconds)[len(seconds) // 2] > 0.85 * MAX_STEP_SECONDS, "the time that there is, is used"


@pytest.mark.parametrize("streams", [0, 1], ids=["no sequence decodes", "a sequence decodes"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [1, 10])
def test_short_prompt_does_not_wait_for_a_long_one(make_world: Make, length: int, overlap: bool, streams: int) -> None:
    here = slow_world(make_world, overlap=overlap, max_num_seqs=8)
    for key in range(10, 10 + streams):
        assert here.add(key, [key] * 4, max_tokens=1000) is None
    clocked(here, lambda: here.tokens.keys() >= set(range(10, 10 + streams)))
    assert here.add(1, [1] * 4000, max_tokens=2) is None
    under_way = clocked(here, lambda: here.engine.counters.scheduled_tokens > 100)[-1:]
    assert here.add(2, [2] * length, max_tokens=2) is None
    seconds = under_way + clocked(here, lambda: 2 in here.tokens)
    assert 1 not in here.tokens
    assert sum(seconds[: len(seconds) - overlap]) <= 2 * MAX_STEP_SECONDS
    here.run()


def test_short_prompts_leave_half_of_each_step_to_a_long_one(make_world: Make) -> None:
    here = slow_world(make_world, max_num_seqs=64)
    assert here.add(1, [1] * 2000, max_tokens=1) is None
    here.step()
    for key in range(2, 400):
        assert here.add(key, [key] * 10, max_tokens=1) is None
    steps = len(clocked(here, lambda: 1 in here.tokens))
    alone = slow_world(make_world)
    assert alone.add(1, [1] * 2000, max_tokens=1) is None
    assert steps <= 2 * len(clocked(alone, lambda: 1 in alone.tokens)) + 1
    assert len(here.tokens) >= 3 * (steps - 1), "several short ones in each step"


def test_prompts_that_are_not_short_keep_their_order(make_world: Make) -> None:
    here = slow_world(make_world)
    for key, length in ((1, 500), (2, 200), (3, 300)):
        assert here.add(key, [key] * length, max_tokens=1) is None
    here.run()
    assert [*here.tokens] == [1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """The cost of steps on a machine: weights are read once, or multiplied with each row where that takes longer."""

    weights: float
    row: float
    sequence: float
    pair: float
    noise: float

    def seconds(self, batch: Batch, chance: Random) -> float:
        total = 1.15 * max(self.weights, self.row * sum(batch.num_scheduled))
        for start, count in zip(batch.num_computed, batch.num_scheduled, strict=True):
            total += self.sequence + self.pair * count * (start + count / 2)
        return total * chance.lognormvariate(0.0, self.noise)


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """The results of a server under a constant number of requests."""

    tokens_per_second: float
    itl: list[float]
    """Inter-token latencies, in ascending order."""


def serve(machine: CostModel, *, max_stall: float, workload: tuple[int, int, int], guess: float = 1.0) -> ClosedLoop:
    """Serve a workload of input tokens, output tokens and concurrency, with five times as many requests in total."""
    inputs, outputs, concurrency = workload
    layout = KVCacheLayout(block_size=16, groups=(KVCacheGroup(layers=(0,), num_blocks=4000),))
    options = SchedulerOptions(max_num_seqs=64, enable_prefix_caching=False)
    costs = StepCosts(fixed=guess * machine.weights, per_token=guess * machine.row, per_pair=guess * machine.pair)
    bound = StallBound(max_stall, at_least=16, costs=costs) if max_stall else None
    scheduler, chance, now = Scheduler(options, ModelTraits(max_model_len=4096), layout, None, bound), Random(3), 0.0
    params = SamplingParams(max_tokens=outputs, temperature=0.0, ignore_eos=True)
    todo, done = iter(range(5 * concurrency)), 0
    last: dict[int, float] = {}
    itl = []

    def send() -> None:
        if (key := next(todo, None)) is not None:
            assert scheduler.add(Request(key=key, prompt_token_ids=[1] * inputs, params=params, seed=0)) is None

    for _ in range(concurrency):
        send()
    while done < 5 * concurrency:
        batch = scheduler.schedule()
        assert batch is not None
        seconds = machine.seconds(batch, chance)
        now += seconds
        output = scheduler.commit(batch, RunnerOutput(token_ids=[5] * sum(batch.samples), run_seconds=seconds))
        for key in output.keys:
            if key in last:
                itl.append(now - last[key])
            last[key] = now
        for _ in output.finished:
            done += 1
            send()
    return ClosedLoop(tokens_per_second=done * (inputs + outputs) / now, itl=sorted(itl))


@pytest.mark.parametrize("workload", [(1024, 128, 8), (256, 64, 16)], ids=["long prompts", "short prompts"])
@pytest.mark.parametrize("guess", [0.5, 3.0])
@pytest.mark.parametrize(
    "machine",
    [
        pytest.param(CostModel(weights=0.01, row=1e-4, sequence=5e-4, pair=3e-8, noise=0.03), id="fast"),
        pytest.param(CostModel(weights=0.03, row=1.4e-3, sequence=2e-3, pair=6e-7, noise=0.05), id="slow"),
        pytest.param(CostModel(weights=0.03, row=3e-4, sequence=2e-3, pair=1.5e-6, noise=0.03), id="attention"),
        pytest.param(CostModel(weights=0.03, row=1e-3, sequence=2e-3, pair=6e-7, noise=0.15), id="noisy"),
    ],
)
def test_stall_bound_is_kept_at_low_cost(machine: CostModel, guess: float, workload: tuple[int, int, int]) -> None:
    unbounded = serve(machine, max_stall=0.0, workload=workload)
    bounded = serve(machine, max_stall=0.25, workload=workload, guess=guess)
    assert bounded.tokens_per_second >= 0.97 * unbounded.tokens_per_second
    assert bounded.itl[len(bounded.itl) * 99 // 100] <= 1.3 * 0.25
    assert median(bounded.itl) <= 1.25 * median(unbounded.itl)
