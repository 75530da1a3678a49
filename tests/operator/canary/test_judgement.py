"""A canary against the stable revision: with certainty, and never on too few requests."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.gateway import EQUAL_LOAD, bin_of
from quire_operator.api import Canary, Gate, GateMetric
from quire_operator.api.rollout import equal_load
from quire_operator.canary.analysis import (
    Answers,
    Track,
    Tracks,
    Verdict,
    above,
    count,
    hang,
    judge,
    quantile,
    read_tracks,
    summed,
)

TTFT = Gate(metric=GateMetric.TIME_TO_FIRST_TOKEN)
ERRORS = Gate(metric=GateMetric.ERROR_RATE)
ONE = Canary(gates=(TTFT,), min_requests=500)


def latencies(number: int, median: float, *, seed: int = 1, metric: str = "timeToFirstToken") -> Track:
    """Return a track with so many requests of this median, spread like real latencies."""
    rng = random.Random(seed)
    bins = Counter(bin_of(median * rng.lognormvariate(0.0, 0.4)) for _ in range(number))
    return Track(requests=number, latencies={metric: bins})


def verdict(stable: Track, canary: Track, policy: Canary = ONE) -> Verdict:
    return judge(policy, Tracks(stable=stable, canary=canary))[0].verdict


STABLE = latencies(4000, 0.2)


@pytest.mark.parametrize(
    ("number", "median", "expected"),
    [
        (2000, 0.2, Verdict.PASSED),
        (2000, 0.1, Verdict.PASSED),
        (600, 0.3, Verdict.FAILED),
        (2000, 0.23, Verdict.WAITING),  # at the limit
        (499, 5.0, Verdict.WAITING),
        (499, 0.01, Verdict.WAITING),
    ],
)
def test_latency_is_compared_with_stable(number: int, median: float, expected: Verdict) -> None:
    assert verdict(STABLE, latencies(number, median, seed=2)) is expected


def test_too_few_requests_of_stable_are_not_compared_with() -> None:
    result = judge(ONE, Tracks(stable=latencies(499, 0.2), canary=latencies(2000, 1.0, seed=2)))[0]
    assert (result.verdict, result.leaning) == (Verdict.WAITING, Verdict.FAILED)
    assert "499 of 500 requests" in result.message


@pytest.mark.parametrize(
    ("number", "expected"), [(1000, Verdict.NO_DATA), (999, Verdict.WAITING), (0, Verdict.WAITING)]
)
def test_absent_latency_metric_is_ignored(number: int, expected: Verdict) -> None:
    """Requests that met another load have no latencies, however many they are."""
    policy = replace(ONE, gates=(Gate(metric=GateMetric.INTER_TOKEN_LATENCY),))
    canary = Track(requests=100_000, latencies=latencies(number, 0.2).latencies)
    assert verdict(STABLE, canary, policy) is expected


@pytest.mark.parametrize(
    ("weight", "stable", "canary", "is_hung"),
    [
        (50, 0, 19, False),
        (50, 0, 20, True),
        (10, 0, 6, True),
        (10, 0, 5, False),
        (10, 1000, 100, False),
        (50, 1000, 1500, False),  # as slow as stable, or nearly
        (50, 1000, 4001, True),
        (50, 0, 0, False),
    ],
)
def test_requests_without_an_answer_are_a_hang(weight: int, stable: int, canary: int, is_hung: bool) -> None:
    found = Tracks(stable=Track(requests=5000, unanswered=stable), canary=Track(unanswered=canary))
    assert (hang(found, weight) is not None) == is_hung


@pytest.mark.parametrize(
    ("stable", "canary", "expected"),
    [
        # Before minRequests, only an error rate far above the limit fails.
        ((10_000, 0), (499, 499), Verdict.FAILED),
        ((10_000, 0), (50, 7), Verdict.FAILED),
        ((10_000, 0), (49, 49), Verdict.WAITING),
        ((10_000, 0), (499, 5), Verdict.WAITING),
        ((10_000, 5_000), (499, 250), Verdict.WAITING),
        ((10_000, 0), (500, 15), Verdict.FAILED),
        ((10_000, 0), (1000, 0), Verdict.PASSED),
        ((10_000, 0), (500, 2), Verdict.WAITING),
        ((10_000, 100), (4000, 40), Verdict.PASSED),
        ((10_000, 10), (4000, 40), Verdict.FAILED),
        ((10_000, 10_000), (4000, 4000), Verdict.PASSED),
        ((0, 0), (4000, 0), Verdict.PASSED),
        ((10_000, 0), (100_000, 2000), Verdict.FAILED),
    ],
)
def test_error_rate(stable: tuple[int, int], canary: tuple[int, int], expected: Verdict) -> None:
    policy = replace(ONE, gates=(ERRORS,))
    tracks = [Track(requests=requests, errors=errors) for requests, errors in (stable, canary)]
    assert verdict(tracks[0], tracks[1], policy) is expected


@pytest.mark.parametrize(
    ("errors", "requests", "expected"), [(0, 500, Verdict.PASSED), (0, 499, Verdict.WAITING), (1, 500, Verdict.FAILED)]
)
def test_zero_error_limit_can_pass(errors: int, requests: int, expected: Verdict) -> None:
    policy = replace(ONE, gates=(replace(ERRORS, max_percent=0.0),))
    assert verdict(Track(requests=10_000), Track(requests=requests, errors=errors), policy) is expected


COMPARING = Canary(gates=(Gate(metric=GateMetric.ANSWERS),))


@pytest.mark.parametrize(
    ("compared", "different", "limit", "expected", "leaning"),
    [
        (0, 0, None, Verdict.WAITING, None),
        (19, 19, None, Verdict.WAITING, None),
        (20, 4, None, Verdict.FAILED, Verdict.FAILED),
        (20, 1, None, Verdict.WAITING, Verdict.FAILED),
        (300, 0, None, Verdict.WAITING, Verdict.PASSED),
        (310, 0, None, Verdict.PASSED, Verdict.PASSED),
        (2000, 20, None, Verdict.PASSED, Verdict.PASSED),
        (310, 1, 0.0, Verdict.FAILED, Verdict.FAILED),
        (320, 0, 0.0, Verdict.PASSED, Verdict.PASSED),
        (20, 20, 100.0, Verdict.PASSED, Verdict.PASSED),
    ],
)
def test_answers(
    compared: int, different: int, limit: float | None, expected: Verdict, leaning: Verdict | None
) -> None:
    policy = replace(COMPARING, gates=(replace(COMPARING.gates[0], max_percent=limit),))
    found = Tracks(answers=Answers(compared=compared, different=different, near_ties=2, failed=1))
    (result,) = judge(policy, found)
    assert (result.verdict, result.leaning) == (expected, leaning)
    assert (result.canary.count, result.canary.errors) == (compared, different)


def test_gateway_reports_are_summed() -> None:
    page = (
        b'{"models": {"chat": {"revision": "r", "tracks": {"canary": {"requests": 3, "errors": 1, '
        b'"unanswered": 4, "latencies": {"timeToFirstToken": {"61": 2}}}}, "answers": {"compared": 4, "nearTies": 1}}}}'
    )
    one = read_tracks(page)
    total = summed([one, one])["chat", "r"].canary
    assert summed([one, one])["chat", "r"].answers == Answers(compared=8, near_ties=2)
    assert (total.requests, total.errors, total.unanswered) == (6, 2, 8)
    assert total.histogram("timeToFirstToken") == {61: 4}
    for bad in (b"", b"[]", b'{"models": {"chat": {"tracks": {}}}}', b'{"models": 1}'):
        with pytest.raises(ValueError):
            read_tracks(bad)


histograms = st.dictionaries(st.integers(0, 320), st.integers(1, 50), min_size=1, max_size=20)


@given(histograms, st.floats(0.01, 0.99))
def test_share_above_a_quantile_is_the_rest(histogram: dict[int, int], share: float) -> None:
    found = quantile(histogram, share)
    assert found is not None
    assert above(histogram, found) == pytest.approx((1 - share) * count(histogram), abs=0.02 * count(histogram) + 0.02)


@given(histograms, histograms)
def test_any_histograms_are_judged(one: dict[int, int], other: dict[int, int]) -> None:
    stable = Track(requests=sum(one.values()), latencies={"timeToFirstToken": one})
    canary = Track(requests=sum(other.values()), latencies={"timeToFirstToken": other})
    for result in judge(replace(Canary(), min_requests=50), Tracks(stable=stable, canary=canary)):
        assert result.verdict in Verdict and result.message


def test_gate_says_that_the_weight_does_not_reach_equal_load() -> None:
    result = judge(ONE, Tracks(stable=Track(requests=4000), canary=Track(requests=500)))[0]
    assert result.verdict is Verdict.WAITING and "50 % always does" in result.message
    early = judge(ONE, Tracks(stable=Track(requests=4000), canary=Track(requests=499)))[0]
    assert "50 %" not in early.message


@given(st.integers(1, 500))
def test_half_of_the_requests_reaches_equal_load_with_any_replicas(replicas: int) -> None:
    canary, share = equal_load(50, replicas)
    assert abs(share * replicas / ((100 - share) * canary) - 1) <= EQUAL_LOAD
