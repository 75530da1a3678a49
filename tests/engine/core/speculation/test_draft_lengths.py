"""Drafts are verified while they are expected to increase the tokens per second, and no longer."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.speculation.draft_lengths import AcceptanceRate, choose_lengths
from quire_engine.core.speculation.step_curve import StepCurve
from quire_engine.core.stall_bound import StepCosts


def line(fixed: float, per_token: float) -> Callable[[int], float]:
    return lambda tokens: fixed + per_token * tokens


def tile(tokens: int) -> float:
    return 1.0 if tokens <= 16 else 10.0


@pytest.mark.parametrize(
    ("rates", "proposed", "others", "most", "seconds", "expected"),
    [
        ([0.9], [8], 0, 256, line(1.0, 0.0), [8]),  # drafts cost nothing
        ([0.9], [8], 0, 256, line(0.0, 1.0), [0]),  # a draft costs as much as a step
        ([0.0], [8], 0, 256, line(1.0, 0.0), [0]),  # none is accepted
        ([0.8], [8], 0, 256, line(1.0, 0.1), [6]),
        ([0.3], [8], 0, 256, line(1.0, 0.1), [1]),
        ([0.8], [8], 4, 256, line(1.0, 0.1), [4]),  # among others a draft saves a smaller part of a step
        ([0.8], [8], 100, 256, line(1.0, 0.1), [0]),
        ([0.9, 0.2], [4, 8], 0, 256, line(1.0, 0.2), [4, 0]),  # the better sequence has the drafts
        ([0.9, 0.9], [2, 8], 0, 256, line(1.0, 0.0), [2, 8]),
        ([0.9, 0.9], [8, 8], 0, 3, line(1.0, 0.0), [2, 1]),  # room for three
        ([0.9], [8], 0, 0, line(1.0, 0.0), [0]),
        ([0.98] * 4, [8] * 4, 0, 256, tile, [3, 3, 3, 3]),  # up to the end of the tile
        ([0.98] * 16, [8] * 16, 0, 256, tile, [0] * 16),  # no further one: twice the tokens in ten times the time
    ],
)
def test_lengths_follow_rates_and_costs(
    rates: list[float],
    proposed: list[int],
    others: int,
    most: int,
    seconds: Callable[[int], float],
    expected: list[int],
) -> None:
    assert choose_lengths(rates, proposed, others=others, most=most, seconds=seconds) == expected


@pytest.mark.parametrize(
    ("rates", "per_pass", "expected"),
    [([0.9], 0.0, [8]), ([0.9], 0.2, [6]), ([0.9], 1.0, [0]), ([0.9] * 4, 0.5, [3, 3, 3, 3])],
)
def test_passes_of_a_draft_model_cost_time(rates: list[float], per_pass: float, expected: list[int]) -> None:
    """A pass gives all sequences one draft, so that it is worth more the more sequences there are."""
    chosen = choose_lengths(
        rates, [8] * len(rates), others=0, most=99, seconds=line(1.0, 0.01), seconds_per_pass=per_pass
    )
    assert chosen == expected


costs = st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1.0))


@given(
    rates=st.lists(st.floats(0.0, 0.95), min_size=1, max_size=3),
    others=st.integers(0, 8),
    cost=costs,
    step=st.integers(1, 8),
)
def test_chosen_draft_lengths_maximize_expected_speed(
    rates: list[float], others: int, cost: tuple[float, float], step: int
) -> None:
    """The costs may be a staircase, which no greedy choice would survive."""

    def seconds(tokens: int) -> float:
        return cost[0] + cost[1] * (tokens // step)

    def speed(lengths: tuple[int, ...]) -> float:
        tokens = others + sum(sum(rate**i for i in range(k + 1)) for rate, k in zip(rates, lengths, strict=True))
        return tokens / seconds(others + len(rates) + sum(lengths))

    chosen = choose_lengths(rates, [3] * len(rates), others=others, most=99, seconds=seconds, least_gain=1.0)
    best = max(map(speed, product(range(4), repeat=len(rates))))
    # Drafts below the least probability are not considered.
    assert speed(tuple(chosen)) >= best * 0.97


def test_a_rate_starts_with_its_prior_and_follows_the_drafts() -> None:
    rate = AcceptanceRate(0.6, weight=2.0, memory=24.0)
    assert rate.value == pytest.approx(0.6)
    rate.observe(0, 5)  # only the first draft was decided
    assert rate.value == pytest.approx(0.4, abs=0.02)
    for _ in range(40):
        rate.observe(5, 5)
    assert rate.value > 0.95
    for _ in range(40):
        rate.observe(0, 5)
    assert rate.value < 0.2


def test_step_curve_starts_with_warm_up_measurements() -> None:
    curve = StepCurve(StepCosts(fixed=0.004, per_token=0.001, per_pair=1e-9))
    assert [curve.seconds(tokens) for tokens in (1, 2, 9, 2000)] == pytest.approx([0.004, 0.005, 0.012, 2.003])


def test_step_curve_learns_the_steps_of_a_tile() -> None:
    curve = StepCurve(StepCosts(fixed=1.0, per_token=0.5, per_pair=1e-9))
    for _ in range(60):
        for tokens in (1, 2, 4, 8, 16, 24, 32):
            curve.observe(tokens, 1.0 if tokens <= 16 else 2.0)
    assert [curve.seconds(tokens) for tokens in (1, 4, 8, 16)] == pytest.approx([1.0] * 4, rel=0.15)
    assert curve.seconds(24) == pytest.approx(2.0, rel=0.15)


def test_a_slower_machine_raises_the_parts_that_are_not_measured() -> None:
    curve = StepCurve(StepCosts(fixed=1.0, per_token=0.0, per_pair=1e-9))
    for _ in range(200):
        curve.observe(1, 3.0)
    assert curve.seconds(1) == pytest.approx(3.0, rel=0.05)
    assert 1.5 < curve.seconds(8) < 2.5


def test_initial_cost_of_drafts_is_above_zero() -> None:
    """A warm-up on a busy machine may measure that prompts cost nothing."""
    curve = StepCurve(StepCosts(fixed=1.0, per_token=1e-12, per_pair=1e-9))
    assert curve.seconds(11) == pytest.approx(1.2)


def test_single_outlier_and_zero_time_hardly_change_the_curve() -> None:
    curve = StepCurve(StepCosts(fixed=1.0, per_token=0.1, per_pair=1e-9))
    curve.observe(4, 0.0)
    assert curve.seconds(4) == pytest.approx(1.3)
    for _ in range(20):
        curve.observe(4, 1.3)
    curve.observe(4, 1000.0)
    assert curve.seconds(4) < 1.3 * 1.25


def test_the_first_step_corrects_the_warm_up_at_once() -> None:
    """The warm-up may have measured a machine that was busy: then all of its figures are too high."""
    curve = StepCurve(StepCosts(fixed=2.0, per_token=0.1, per_pair=1e-9))
    curve.observe(4, 1.15)
    assert curve.seconds(4) == pytest.approx(1.15, rel=0.1)
    assert curve.seconds(8) < 2.7 * 0.8
