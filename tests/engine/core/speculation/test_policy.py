"""The choice of drafts maximizes the expected tokens per second, by costs and rates that follow what was measured."""

from collections.abc import Callable
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.core.speculation.policy import AcceptanceRate, CostTable, DraftPolicy, choose_lengths


def line(fixed: float, per_token: float) -> Callable[[int], float]:
    return lambda tokens: fixed + per_token * tokens


def tile(tokens: int) -> float:
    return 1.0 if tokens <= 16 else 10.0


@pytest.mark.parametrize(
    ("rates", "proposed", "others", "most", "seconds", "expected"),
    [
        ([0.9], [8], 0, 256, line(1.0, 0.0), [8]),  # drafts cost nothing
        ([0.8], [8], 0, 256, line(1.0, 0.1), [6]),
        ([0.3], [8], 0, 256, line(1.0, 0.1), [1]),
        ([0.8], [8], 4, 256, line(1.0, 0.1), [4]),  # among others a draft saves a smaller part of a step
        ([0.9, 0.2], [4, 8], 0, 256, line(1.0, 0.2), [4, 0]),  # the better sequence has the drafts
        ([0.9, 0.9], [2, 8], 0, 256, line(1.0, 0.0), [2, 8]),
        ([0.9, 0.9], [8, 8], 0, 3, line(1.0, 0.0), [2, 1]),  # room for three
        ([0.9], [8], 0, 0, line(1.0, 0.0), [0]),
        ([0.98] * 4, [8] * 4, 0, 256, tile, [3, 3, 3, 3]),  # up to the end of the tile
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
    assert choose_lengths(rates, proposed, others=others, most=most, seconds=seconds).lengths == expected


@pytest.mark.parametrize(
    ("rate", "others", "seconds", "per_pass", "gain"),
    [
        (0.9, 0, line(1.0, 0.0), 0.0, 1.9),
        (0.9, 0, line(0.0, 1.0), 0.0, 0.95),  # a draft costs as much as a step
        (0.0, 0, line(1.0, 0.0), 0.0, 1.0),  # none is accepted
        (0.9, 0, line(1.0, 0.0), 1.0, 0.95),  # a pass of the draft model costs as much as a step
        (0.9, 9, line(1.0, 0.0), 0.0, 1.09),
    ],
)
def test_gain_is_relative_to_a_step_without_drafts(
    rate: float, others: int, seconds: Callable[[int], float], per_pass: float, gain: float
) -> None:
    choice = choose_lengths(
        [rate], [1], others=others, most=9, seconds=seconds, draft_seconds=lambda passes: passes * per_pass
    )
    assert choice.lengths == [1] and choice.gain == pytest.approx(gain)


@given(
    rates=st.lists(st.floats(0.0, 0.95), min_size=1, max_size=3),
    others=st.integers(0, 8),
    cost=st.tuples(st.floats(0.01, 1.0), st.floats(0.0, 1.0)),
    step=st.integers(1, 8),
)
def test_chosen_lengths_maximize_expected_speed(
    rates: list[float], others: int, cost: tuple[float, float], step: int
) -> None:
    """The costs may be a staircase, which no greedy choice would survive."""

    def seconds(tokens: int) -> float:
        return cost[0] + cost[1] * (tokens // step)

    def speed(lengths: tuple[int, ...]) -> float:
        tokens = others + sum(sum(rate**i for i in range(k + 1)) for rate, k in zip(rates, lengths, strict=True))
        return tokens / seconds(others + len(rates) + sum(lengths))

    chosen = choose_lengths(rates, [3] * len(rates), others=others, most=99, seconds=seconds)
    best = max(speed(lengths) for lengths in product(range(4), repeat=len(rates)) if any(lengths))
    # Drafts below the least probability are not considered.
    assert speed(tuple(chosen.lengths)) >= best * 0.97


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


def test_costs_start_with_the_warm_up() -> None:
    costs = CostTable(fixed=0.004, per_token=0.001)
    assert [costs.seconds(tokens) for tokens in (1, 2, 9, 2000)] == pytest.approx([0.004, 0.005, 0.012, 2.003])


def test_costs_follow_the_stairs_of_a_tile() -> None:
    costs = CostTable(fixed=1.0, per_token=0.5)
    for _ in range(60):
        for tokens in (1, 2, 4, 8, 16, 24, 32):
            costs.observe(tokens, 1.0 if tokens <= 16 else 2.0)
    assert [costs.seconds(tokens) for tokens in (1, 4, 8, 16)] == pytest.approx([1.0] * 4, rel=0.15)
    assert costs.seconds(24) == pytest.approx(2.0, rel=0.15)


def test_a_slower_machine_raises_the_costs_that_are_not_measured() -> None:
    costs = CostTable(fixed=1.0, per_token=0.0)
    for _ in range(20):
        costs.observe(1, 1.0)
    for _ in range(200):
        costs.observe(1, 3.0)
    assert costs.seconds(1) == pytest.approx(3.0, rel=0.05)
    assert costs.seconds(8) > 1.3


def test_the_first_step_corrects_the_warm_up_at_once() -> None:
    """The warm-up may have measured a machine that was busy: then all of its figures are too high."""
    costs = CostTable(fixed=2.0, per_token=0.1)
    costs.observe(4, 1.15)
    assert costs.seconds(4) == pytest.approx(1.15, rel=0.1)
    assert costs.seconds(8) < 2.7 * 0.8


def test_a_hiccup_and_a_time_of_zero_hardly_change_the_costs() -> None:
    """And a warm-up on a busy machine may have measured that tokens cost nothing."""
    costs = CostTable(fixed=1.0, per_token=1e-12)
    costs.observe(4, 0.0)
    assert costs.seconds(4) == pytest.approx(1.06)
    for _ in range(20):
        costs.observe(4, 1.3)
    before = costs.seconds(4)
    costs.observe(4, 1000.0)
    assert before < costs.seconds(4) < before * 1.05


@pytest.mark.parametrize("per_pass", [0.05, 5.0])
def test_drafts_are_excluded_exactly_where_no_step_may_have_them(per_pass: float) -> None:
    policy = DraftPolicy(None, most_drafts=64, seconds_per_pass=per_pass)
    for number in range(400):
        sequences = (1, 3, 4, 31, 32, 33)[number * 7 % 6]
        excluded = policy.excludes_drafts(sequences)
        assert policy.begin_step(sequences) is not excluded
        drafts = [] if excluded else policy.choose([0.6] * sequences, [2] * sequences, others=0)
        policy.observe_step(
            sequences + sum(drafts),
            1.0 + per_pass * any(drafts),
            drafts=sum(drafts),
            accepted=sum(drafts) // 2,
            passes=max(drafts, default=0),
            draft_seconds=per_pass * any(drafts),
        )
