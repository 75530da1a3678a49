"""Targets for whole latencies: what they require, how far replicas help, and what a story of ticks does with them."""

import math
from dataclasses import replace

import pytest

from quire_operator.api import FirstTokenTarget, LatencyTarget, ScalingTargets, TokenGapTarget
from quire_operator.autoscaling.demand import Load, Reason, Tuning
from quire_operator.autoscaling.flow import Thresholds, increment
from quire_operator.autoscaling.history import Flow, LateCount
from quire_operator.autoscaling.latency_terms import batch_term, whole_latency_terms, worst_late
from quire_operator.autoscaling.observation import Histogram, ReplicaSample, is_sane
from quire_operator.autoscaling.rates import Rates

NOW = 1000.0
RATES = Rates(
    step_seconds=0.02,
    prefill_seconds_per_token=0.001,
    decode_seconds_per_token=0.001,
    mean_prompt_tokens=500,
    mean_output_tokens=100,
    kv_tokens=100_000,
)
"""A prompt of mean length takes 0.52 s alone, and a token 21 ms."""


def targets(*, first: float | None = None, gap: float | None = None, percentile: int = 95) -> ScalingTargets:
    return ScalingTargets(
        total_time_to_first_token=None
        if first is None
        else FirstTokenTarget(percentile=percentile, threshold_seconds=first),
        inter_token_latency=None if gap is None else TokenGapTarget(percentile=percentile, threshold_seconds=gap),
    )


def flow(*, first: tuple[float, float] = (0, 0), gaps: tuple[float, float] = (0, 0), time: float = NOW) -> Flow:
    return Flow(
        time=time,
        seconds=15.0,
        requests=10,
        prompt_tokens=5000,
        first_tokens=100,
        late_first_tokens=0,
        whole_first_tokens=LateCount(*first),
        token_gaps=LateCount(*gaps),
    )


def terms(seen: Flow, wanted: ScalingTargets, *, replicas: int = 2, need: float = 2.0, rates: Rates | None = RATES):
    return [
        (term.reason, term.need)
        for term in whole_latency_terms(
            [seen], targets=wanted, rates=rates, replicas=replicas, need=need, tuning=Tuning(), now=NOW
        )
    ]


FIRST, GAP = Reason.TOTAL_FIRST_TOKEN, Reason.TOKEN_GAP


@pytest.mark.parametrize(
    ("seen", "wanted", "expected"),
    [
        (flow(first=(100, 50)), targets(), []),
        (flow(first=(100, 5)), targets(first=1.0), []),
        (flow(first=(100, 6)), targets(first=1.0), [(FIRST, 3.0)]),
        (flow(first=(100, 6)), targets(first=1.0, percentile=90), []),
        (flow(first=(10, 1)), targets(first=1.0), []),
        (flow(first=(100, 50), time=NOW - 31), targets(first=1.0), []),
        (flow(gaps=(1000, 60)), targets(gap=0.05), [(GAP, 3.0)]),
        (flow(gaps=(1000, 40)), targets(gap=0.05), []),
        (flow(first=(100, 6), gaps=(1000, 60)), targets(first=1.0, gap=0.05), [(FIRST, 3.0), (GAP, 3.0)]),
    ],
)
def test_a_missed_target_requires_one_more_replica(seen: Flow, wanted: ScalingTargets, expected: list) -> None:
    assert terms(seen, wanted) == expected


@pytest.mark.parametrize(
    ("replicas", "need", "expected"),
    [(2, 0.5, 2.0), (3, 0.5, 2.5), (3, 1.0, 3.0), (3, 2.0, 4.0), (9, 5.0, 10.0), (10, 5.0, 10.0), (20, 5.0, 10.0)],
)
def test_replicas_are_added_only_if_they_help(replicas: int, need: float, expected: float) -> None:
    """Beyond twice the other signals and two more, a late answer has another cause."""
    assert terms(flow(first=(100, 50)), targets(first=1.0), replicas=replicas, need=need) == [(FIRST, expected)]


@pytest.mark.parametrize(
    ("wanted", "seen"), [(targets(first=0.5), flow(first=(100, 100))), (targets(gap=0.02), flow(gaps=(100, 100)))]
)
def test_a_target_that_one_request_alone_misses_adds_nothing(wanted: ScalingTargets, seen: Flow) -> None:
    assert [need for _, need in terms(seen, wanted)] == [0.0]
    assert [need for _, need in terms(seen, wanted, rates=None)] == [3.0], "nothing is known about a request alone"
    assert worst_late(seen, targets=wanted, rates=RATES) == 0.0


@pytest.mark.parametrize(
    ("gap", "running", "waiting", "expected"),
    [
        # 0.8 × (0.1 s − 0.02 s) / 0.001 s = 64 sequences per replica.
        (0.1, 64, 0, 1.0),
        (0.1, 64, 64, 2.0),
        (0.1, 0, 0, 0.0),
        (0.0211, 4, 0, 4.0),
    ],
)
def test_the_batch_bounds_how_many_requests_a_replica_runs(
    gap: float, running: float, waiting: float, expected: float
) -> None:
    load = Load(replicas=2, waiting=waiting, running=running, queued_prompt_tokens=0, kv_tokens_used=0)
    term = batch_term(load, targets=targets(gap=gap), rates=RATES)
    assert term is not None
    assert (term.reason, term.need) == (GAP, pytest.approx(expected))


@pytest.mark.parametrize(
    ("wanted", "rates"),
    [
        (targets(), RATES),
        (targets(gap=0.1), None),
        (targets(gap=0.02), RATES),
        (targets(gap=0.1), replace(RATES, decode_seconds_per_token=0.0)),
    ],
    ids=["no target", "no rates", "impossible", "free tokens"],
)
def test_batch_term_is_none_without_a_bound(wanted: ScalingTargets, rates: Rates | None) -> None:
    load = Load(replicas=1, waiting=9, running=9, queued_prompt_tokens=0, kv_tokens_used=0)
    assert batch_term(load, targets=wanted, rates=rates) is None


@pytest.mark.parametrize(
    ("seen", "wanted", "late"),
    [
        (flow(), targets(first=1.0), 0.0),
        (flow(first=(200, 20)), targets(first=1.0), 10.0),
        # 20 % late tokens miss p80 as clearly as 5 % miss p95.
        (flow(gaps=(1000, 200)), targets(gap=0.1, percentile=80), 5.0),
        (flow(gaps=(1000, 1000)), targets(gap=0.1, percentile=99), 100.0),
    ],
)
def test_correction_follows_the_most_violated_target(seen: Flow, wanted: ScalingTargets, late: float) -> None:
    assert worst_late(seen, targets=wanted, rates=RATES) == pytest.approx(late)


def sample(time: float, *, quick: float, late: float) -> ReplicaSample:
    seen = Histogram(bounds=(0.5, 1.0, math.inf), counts=(quick, quick, quick + late))
    gauges = {"waiting": 0.0, "running": 1.0, "queued_prompt_tokens": 0.0, "kv_tokens_used": 0.0}
    return ReplicaSample(time=time, kv_tokens_capacity=1000.0, first_token_times=seen, token_gaps=seen, **gauges)


def test_increments_count_only_metrics_with_a_target() -> None:
    before, after = sample(0.0, quick=10, late=1), sample(15.0, quick=16, late=5)
    grown = increment(before, after, Thresholds.of(targets(first=1.0)))
    assert (grown.whole_first_tokens, grown.token_gaps) == (LateCount(10, 4), LateCount())
    grown = increment(before, after, Thresholds.of(targets(gap=0.5)))
    assert (grown.whole_first_tokens, grown.token_gaps) == (LateCount(), LateCount(10, 4))
    restarted = increment(after, before, Thresholds.of(targets(gap=0.5)))
    assert restarted.token_gaps == LateCount(11, 1)


@pytest.mark.parametrize("name", ["first_token_times", "token_gaps"])
def test_impossible_histograms_are_rejected(name: str) -> None:
    good = sample(0.0, quick=1, late=1)
    assert is_sane(good)
    assert not is_sane(replace(good, **{name: Histogram(bounds=(1.0, math.inf), counts=(5.0, 3.0))}))


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (ScalingTargets(), LatencyTarget(percentile=95, threshold_seconds=1.0)),
        (
            ScalingTargets(time_to_first_token=LatencyTarget(percentile=99, threshold_seconds=0.5)),
            LatencyTarget(percentile=99, threshold_seconds=0.5),
        ),
        (
            ScalingTargets(
                time_to_first_token=LatencyTarget(percentile=99, threshold_seconds=0.5),
                first_token_wait=LatencyTarget(percentile=90, threshold_seconds=2.0),
            ),
            LatencyTarget(percentile=90, threshold_seconds=2.0),
        ),
    ],
    ids=["default", "former name", "both"],
)
def test_queue_time_target_keeps_its_threshold_under_the_old_name(
    stored: ScalingTargets, expected: LatencyTarget
) -> None:
    assert stored.wait == expected
    assert Thresholds.of(stored).wait == expected.threshold_seconds


def test_late_tokens_add_a_replica_and_then_keep_it(kit) -> None:
    """Tokens are late with two replicas and in time with three, which stay after the scale-down window."""
    story = kit.story(current=2)
    rules = story.policy.autoscaling
    story.policy = replace(
        story.policy, autoscaling=replace(rules, targets=replace(rules.targets, inter_token_latency=_GAP))
    )
    quick, late = 1000.0, 0.0

    def tick(lates: float, *, loading: str = "") -> tuple[int, Reason]:
        nonlocal quick, late
        quick, late = quick + 1000, late + lates
        seen = Histogram(bounds=(0.1, 0.2, math.inf), counts=(quick, quick, quick + late))
        up = [kit.ready(name, running=6, token_gaps=seen) for name in "abc"[: story.target] if name not in loading]
        decision = story.tick(*up, *(kit.loading(name) for name in loading))
        return decision.desired, decision.reason

    for _ in range(4):
        assert tick(0)[0] == 2
    assert tick(200) == (3, Reason.TOKEN_GAP)
    assert "interTokenLatency 100ms, p95" in story.decisions[-1].message
    for _ in range(3):
        assert tick(0, loading="c")[0] == 3
    for _ in range(15):
        assert tick(0)[0] == 3, "two were not enough within the scale-down window"


_GAP = TokenGapTarget(percentile=95, threshold_seconds=0.1)
