"""A canary against the stable revision: at equal load, with certainty, and never on too few requests."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.contract.tracks import bin_of
from quire_operator.domain.canary.figures import Answers, Track, Tracks, above, count, quantile, read_tracks, summed
from quire_operator.domain.canary.judgement import Verdict, curve, judge
from quire_operator.domain.resource import Canary, Gate, GateMetric

TTFT = Gate(metric=GateMetric.TIME_TO_FIRST_TOKEN)
ERRORS = Gate(metric=GateMetric.ERROR_RATE)
ONE = Canary(gates=(TTFT,), min_requests=500)


def latencies(loads: dict[int, tuple[int, float]], *, seed: int = 1) -> Track:
    """Return a track with so many requests of this median at each level, spread like real latencies."""
    rng = random.Random(seed)
    levels: dict[int, dict[str, dict[int, int]]] = {}
    for level, (number, median) in loads.items():
        bins: dict[int, int] = {}
        for _ in range(number):
            place = bin_of(median * rng.lognormvariate(0.0, 0.4))
            bins[place] = bins.get(place, 0) + 1
        levels[level] = {"timeToFirstToken": bins}
    requests = sum(number for number, _ in loads.values())
    return Track(requests=requests, warm_requests=requests, levels=levels)


def verdict(stable: Track, canary: Track, policy: Canary = ONE) -> Verdict:
    return judge(policy, Tracks(stable=stable, canary=canary))[0].verdict


LOADED = {3: (4000, 0.2), 4: (4000, 0.4)}


def test_same_latency_at_equal_load_passes() -> None:
    assert verdict(latencies(LOADED), latencies({3: (1500, 0.2), 4: (1500, 0.4)}, seed=2)) is Verdict.PASSED


def test_slower_at_equal_load_fails() -> None:
    assert verdict(latencies(LOADED), latencies({3: (600, 0.3), 4: (600, 0.6)}, seed=2)) is Verdict.FAILED


def test_idle_canary_is_not_judged_by_its_raw_percentile() -> None:
    """It is half as slow as the stable revision, at a tenth of the load: that says nothing."""
    result = judge(ONE, Tracks(stable=latencies(LOADED), canary=latencies({0: (2000, 0.15)}, seed=2)))[0]
    assert result.verdict is Verdict.WAITING
    assert "a larger weightPercent brings the loads closer" in result.message


def test_idle_canary_that_is_slower_than_loaded_replicas_fails() -> None:
    assert verdict(latencies(LOADED), latencies({0: (2000, 0.5)}, seed=2)) is Verdict.FAILED


def test_loaded_canary_that_is_as_fast_as_idle_replicas_passes() -> None:
    assert verdict(latencies({0: (4000, 0.2)}), latencies({3: (2000, 0.2)}, seed=2)) is Verdict.PASSED


@pytest.mark.parametrize(
    ("median", "expected"),
    [
        (0.2, Verdict.PASSED),
        (1.0, Verdict.WAITING),  # a queue of so many requests may explain it
        (6.0, Verdict.FAILED),
    ],
)
def test_canary_with_a_growing_queue_fails(median: float, expected: Verdict) -> None:
    """Clients wait for the slow canary, so that the stable replicas never have its load."""
    stable = latencies({0: (3000, 0.2), 1: (3000, 0.2), 4: (19, 0.2)})
    result = judge(ONE, Tracks(stable=stable, canary=latencies({4: (2000, median)}, seed=2)))[0]
    assert result.verdict is expected
    assert ("pile up" in result.message) == (expected is Verdict.FAILED)


def test_different_load_mix_does_not_fail_the_canary() -> None:
    """The stable replicas are mostly busy and the canary mostly idle; each load has the same latency."""
    stable = latencies({1: (500, 0.1), 5: (8000, 0.9)})
    canary = latencies({1: (2000, 0.1), 5: (100, 0.9)}, seed=2)
    assert verdict(stable, canary) is Verdict.PASSED
    slower = latencies({1: (2000, 0.14), 5: (100, 1.3)}, seed=3)
    assert verdict(stable, slower) is Verdict.FAILED, "its raw p95 is far below the stable one"


@pytest.mark.parametrize("median", [0.01, 0.2, 5.0])
def test_too_few_requests_are_never_judged(median: float) -> None:
    result = judge(ONE, Tracks(stable=latencies({3: (4000, 0.2)}), canary=latencies({3: (499, median)})))[0]
    assert (result.verdict, result.remaining) == (Verdict.WAITING, 1)


@pytest.mark.parametrize(("warm", "expected"), [(1000, Verdict.NO_DATA), (999, Verdict.WAITING), (0, Verdict.WAITING)])
def test_absent_latency_metric_is_ignored(warm: int, expected: Verdict) -> None:
    """Requests of replicas that have just started have no latencies, however many they are."""
    policy = replace(ONE, gates=(Gate(metric=GateMetric.INTER_TOKEN_LATENCY),))
    canary = Track(requests=100_000, warm_requests=warm)
    assert verdict(latencies(LOADED), canary, policy) is expected


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
        ((10_000, 0), (700, 0), Verdict.PASSED),
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
    ("errors", "requests", "expected"),
    [(0, 500, Verdict.PASSED), (0, 499, Verdict.WAITING), (1, 500, Verdict.FAILED)],
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


def test_latency_curve_has_both_tracks_by_load() -> None:
    points = curve(TTFT, Tracks(stable=latencies({1: (400, 0.1)}), canary=latencies({1: (50, 0.1), 3: (10, 0.4)})))
    assert [(p.load, p.stable.count, p.canary.count) for p in points] == [("1", 400, 50), ("4-7", 0, 10)]
    assert points[0].stable.median == pytest.approx(0.1, rel=0.1)
    assert points[1].stable.percentile is None


def test_gateway_reports_are_summed() -> None:
    page = (
        b'{"models": {"chat": {"revision": "r", "tracks": {"canary": {"requests": 3, "warmRequests": 2, "errors": 1, '
        b'"levels": {"2": {"timeToFirstToken": {"61": 2}}}}}, "answers": {"compared": 4, "nearTies": 1}}}}'
    )
    one = read_tracks(page)
    total = summed([one, one])["chat", "r"].canary
    assert summed([one, one])["chat", "r"].answers == Answers(compared=8, near_ties=2)
    assert (total.requests, total.warm_requests, total.errors) == (6, 4, 2)
    assert total.histogram("timeToFirstToken", 2) == {61: 4}
    for bad in (b"", b"[]", b'{"models": {"chat": {"tracks": {}}}}', b'{"models": 1}'):
        with pytest.raises(ValueError):
            read_tracks(bad)


histograms = st.dictionaries(st.integers(0, 320), st.integers(1, 50), min_size=1, max_size=20)


@given(histograms, st.floats(0.01, 0.99))
def test_share_above_a_quantile_is_the_rest(histogram: dict[int, int], share: float) -> None:
    found = quantile([(histogram, 1.0)], share)
    assert found is not None
    assert above(histogram, found) == pytest.approx((1 - share) * count(histogram), abs=0.02 * count(histogram) + 0.02)


@given(histograms, histograms, st.integers(0, 7), st.integers(0, 7))
def test_any_histograms_are_judged(one: dict[int, int], other: dict[int, int], level: int, other_level: int) -> None:
    stable = Track(requests=sum(one.values()), levels={level: {"timeToFirstToken": one}})
    canary = Track(requests=sum(other.values()), levels={other_level: {"timeToFirstToken": other}})
    for result in judge(replace(Canary(), min_requests=50), Tracks(stable=stable, canary=canary)):
        assert result.verdict in Verdict and result.message
        assert result.remaining is None or result.remaining >= 0
