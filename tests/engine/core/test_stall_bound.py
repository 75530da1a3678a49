"""The cost of steps limits their prompt tokens, so that running sequences never wait for long."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.stall_bound import PromptWork, StallBound, StepCosts


def bound_of(
    seconds: float = 0.25, *, fixed: float = 0.02, per_token: float = 1e-3, per_pair: float = 2.5e-7
) -> StallBound:
    costs = StepCosts(fixed=fixed, per_token=per_token, per_pair=per_pair)
    return StallBound(seconds, at_least=16, costs=costs)


def work_of(start: int, count: int) -> PromptWork:
    work = PromptWork()
    work.add(start, count)
    return work


@pytest.mark.parametrize(
    ("bound", "start", "expected"),
    [
        # A step is expected to take 234 ms, since steps vary, and decoding takes 20 of these.
        (bound_of(), 0, 208),
        (bound_of(1.0), 0, 828),
        # Eight thousand tokens of context make a prompt token three times as costly.
        (bound_of(), 8192, 69),
        (bound_of(per_token=1e-5, per_pair=2.5e-9), 0, 9_671),
        # Never less than a block.
        (bound_of(per_token=0.1), 0, 16),
        # Decoding alone takes as long as the bound, so prompts get a quarter.
        (bound_of(fixed=0.25), 0, 57),
        (bound_of(fixed=9.0), 0, 57),
        # Without measurements it starts small.
        (StallBound(0.25, at_least=16), 0, 16),
    ],
)
def test_allowed_tokens_fit_into_the_stall_bound(bound: StallBound, start: int, expected: int) -> None:
    assert bound.allowed_tokens(PromptWork(), start) == expected


def test_planned_tokens_reduce_the_allowance() -> None:
    bound = bound_of()
    assert bound.allowed_tokens(work_of(0, 100), 0) == pytest.approx(110, abs=2)
    assert bound.allowed_tokens(work_of(0, 208), 0) == 0
    slow = bound_of(per_token=0.1)
    assert [slow.allowed_tokens(work_of(0, planned), 0) for planned in (0, 10, 16)] == [16, 6, 0]


class Machine:
    """A machine with these costs plus noise. It computes a prompt in chunks while other sequences decode."""

    def __init__(self, *, fixed: float, per_token: float, per_pair: float, noise: float = 0.0) -> None:
        self.costs = (fixed, per_token, per_pair)
        self.noise = noise
        self.chance = Random(5)

    def seconds(self, work: PromptWork) -> float:
        fixed, per_token, per_pair = self.costs
        return (fixed + per_token * work.tokens + per_pair * work.pairs) * self.chance.lognormvariate(0.0, self.noise)

    def prefill(self, bound: StallBound, length: int) -> list[float]:
        steps, start = [], 0
        while start < length:
            count = min(bound.allowed_tokens(PromptWork(), start), length - start)
            work = work_of(start, count)
            steps.append(self.seconds(work))
            bound.observe(work, steps[-1])
            start += count
        for _ in range(10):
            bound.observe(PromptWork(), self.seconds(PromptWork()))
        return steps


MACHINES = {
    "fast": {"fixed": 0.002, "per_token": 2e-5, "per_pair": 1e-9},
    "slow": {"fixed": 0.08, "per_token": 4e-3, "per_pair": 1e-7},
    "long contexts": {"fixed": 0.02, "per_token": 2e-4, "per_pair": 5e-7},
}


@pytest.mark.parametrize("costs", MACHINES.values(), ids=MACHINES)
@pytest.mark.parametrize("seed_error", [0.3, 1.0, 3.0])
def test_steps_stay_within_the_bound_on_every_machine(costs: dict[str, float], seed_error: float) -> None:
    """An estimate is wrong by a factor if the machine was busy at warm-up or is busy now."""
    machine = Machine(**costs, noise=0.05)
    bound = bound_of(**{name: seed_error * seconds for name, seconds in costs.items()})
    machine.prefill(bound, 4000)  # learns
    steps = [seconds for _ in range(5) for seconds in machine.prefill(bound, 4000)]
    assert max(steps) < 0.25 * 1.4
    assert sorted(steps)[len(steps) * 9 // 10] < 0.25 * 1.02
    # The available time is used.
    if len(steps) > 20:
        assert sorted(steps)[len(steps) // 2] > 0.25 * 0.75


def test_long_decoding_does_not_change_prefill_costs() -> None:
    machine, bound = Machine(**MACHINES["slow"], noise=0.05), bound_of(**MACHINES["slow"])
    machine.prefill(bound, 4000)
    before = bound.allowed_tokens(PromptWork(), 0)
    for _ in range(100_000):
        bound.observe(PromptWork(), machine.seconds(PromptWork()))
    assert bound.allowed_tokens(PromptWork(), 0) == pytest.approx(before, rel=0.1)
    assert max(machine.prefill(bound, 4000)) < 0.25 * 1.3


def test_steps_of_a_noisy_machine_mostly_stay_within_the_bound() -> None:
    machine, bound = Machine(**MACHINES["slow"], noise=0.25), bound_of(**MACHINES["slow"])
    steps = machine.prefill(bound, 8000)
    assert sorted(steps)[len(steps) * 95 // 100] < 0.25 * 1.3


def test_without_an_estimate_chunks_grow_to_the_bound() -> None:
    machine, bound = Machine(**MACHINES["slow"]), StallBound(0.25, at_least=16)
    first, second = machine.prefill(bound, 4000), machine.prefill(bound, 4000)
    assert max(first) < 0.3 and sorted(second)[len(second) // 2] > 0.2


def test_single_slow_step_does_not_halt_prefill() -> None:
    machine, bound = Machine(**MACHINES["slow"]), bound_of(**MACHINES["slow"])
    usual = len(machine.prefill(bound, 4000))
    before = bound.allowed_tokens(PromptWork(), 0)
    bound.observe(work_of(0, before), 10.0)
    assert bound.allowed_tokens(PromptWork(), 0) >= 16
    assert len(machine.prefill(bound, 4000)) < usual * 1.2
    assert bound.allowed_tokens(PromptWork(), 0) > 0.9 * before


seconds = st.floats(1e-9, 1e3)


@given(
    most=st.floats(1e-6, 100.0),
    costs=st.none() | st.builds(StepCosts, fixed=seconds, per_token=seconds, per_pair=seconds),
    history=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 3000), st.floats(0.0, 1e4)), max_size=60),
    start=st.integers(0, 1_000_000),
    planned=st.integers(0, 3000),
)
def test_prompts_always_progress(
    most: float, costs: StepCosts | None, history: list[tuple[int, int, float]], start: int, planned: int
) -> None:
    bound = StallBound(most, at_least=16, costs=costs)
    for begin, count, took in history:
        bound.observe(work_of(begin, count), took)
    assert bound.allowed_tokens(PromptWork(), start) >= 16
    assert planned + bound.allowed_tokens(work_of(0, planned), start) >= 16
