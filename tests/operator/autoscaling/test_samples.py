"""Samples that are wrong, late, duplicated or restarted."""

import math

import pytest

from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.flow import Thresholds, increment, share_above
from quire_operator.autoscaling.observation import (
    Histogram,
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
    is_sane,
)
from quire_operator.autoscaling.supply import known_samples, take_stock


def sample(time: float = 0.0, **figures: object) -> ReplicaSample:
    gauges = {"waiting": 0.0, "running": 0.0, "queued_prompt_tokens": 0.0, "kv_tokens_used": 0.0}
    return ReplicaSample(time=time, **{**gauges, "kv_tokens_capacity": 100.0, **figures})


@pytest.mark.parametrize(
    "figures",
    [
        {"running": math.nan},
        {"waiting": -1.0},
        {"kv_tokens_used": math.inf},
        {"waiting": 1e200},
        {"generation_tokens": 1e308},
        {"kv_tokens_capacity": 0.0},
        {"steps": -3.0},
        {"first_token_waits": Histogram(bounds=(1.0, math.inf), counts=(5.0, 3.0))},
        {"first_token_waits": Histogram(bounds=(math.inf, 1.0), counts=(1.0, 3.0))},
        {"first_token_waits": Histogram(bounds=(), counts=())},
        {"first_token_waits": Histogram(bounds=(1.0, math.inf), counts=(math.nan, 3.0))},
    ],
)
def test_sample_with_impossible_values_is_rejected(figures):
    assert is_sane(sample())
    assert not is_sane(sample(**figures))


def test_sample_is_fresh_for_45_seconds_and_not_from_the_future(kit):
    for age, fresh in ((0.0, True), (45.0, True), (46.0, False), (-20.0, True), (-40.0, False)):
        decision = kit.story(current=1).tick(kit.ready("a", age=age))
        assert (decision.reason is not Reason.METRICS_STALE) is fresh, age


def test_last_valid_sample_is_used_until_it_is_stale(kit):
    story = kit.story(current=2)
    busy = {"running": 7.0}
    story.tick(kit.ready("a", **busy), kit.ready("b", **busy))
    for _ in range(3):
        decision = story.tick(kit.ready("a", age=None), kit.ready("b", running=math.nan))
        assert decision.inputs["running"] == 14
    assert story.tick(kit.ready("a", age=None), kit.ready("b", age=None)).reason is Reason.METRICS_STALE


def test_older_sample_never_replaces_a_newer_one():
    newer, older = sample(time=100.0, running=5.0), sample(time=90.0, running=1.0)
    seen = ReplicaObservation(name="a", phase=ReplicaPhase.READY, sample=older)
    assert known_samples(Observation(replicas=(seen,)), {"a": newer}) == {"a": newer}


def test_replica_named_twice_counts_once_with_its_newest_sample():
    twice = tuple(
        ReplicaObservation(name="a", phase=ReplicaPhase.READY, sample=s)
        for s in (sample(time=90.0, running=1.0), sample(time=100.0, running=5.0), None)
    )
    observation = Observation(replicas=twice)
    supply = take_stock(observation, known_samples(observation, {}), now=100.0)
    assert (supply.current, supply.ready) == (1, 1)
    assert supply.fresh["a"].running == 5.0


def test_draining_replicas_count_as_no_supply_and_no_demand(kit):
    draining = kit.replica(name="d", phase=ReplicaPhase.DRAINING, figures={"running": 10.0, "waiting": 50.0})
    decision = kit.story(current=1).tick(kit.ready("a", running=2), draining)
    assert (decision.desired, decision.inputs["running"], decision.inputs["ready"]) == (1, 2, 1)


# --- counters ---


def test_counters_grow_by_their_difference():
    before = sample(
        arrived_requests=10.0, arrived_prompt_tokens=100.0, generation_tokens=50.0, steps=5.0, busy_seconds=1.0
    )
    after = sample(
        arrived_requests=13.0,
        arrived_prompt_tokens=150.0,
        generation_tokens=90.0,
        rejected_drafts=7.0,
        steps=25.0,
        busy_seconds=2.0,
    )
    grown = increment(before, after, Thresholds(wait=1.0))
    assert (grown.requests, grown.prompt_tokens, grown.generation_tokens) == (3, 50, 40)
    assert (grown.work.steps, grown.work.decode_tokens, grown.work.busy_seconds) == (20, 47, 1.0)


def test_engine_that_restarted_counts_from_zero():
    before = sample(arrived_requests=1000.0, arrived_prompt_tokens=9e6, generation_tokens=5e5, finished_requests=990.0)
    after = sample(arrived_requests=2.0, arrived_prompt_tokens=30.0, generation_tokens=8.0, finished_requests=1.0)
    grown = increment(before, after, Thresholds(wait=1.0))
    assert (grown.requests, grown.prompt_tokens, grown.generation_tokens, grown.finished_requests) == (2, 30, 8, 1)


def test_missing_arrivals_are_departures_plus_present_requests():
    before = sample(waiting=2.0, running=3.0, queued_prompt_tokens=40.0, prompt_tokens=500.0, finished_requests=7.0)
    after = sample(waiting=5.0, running=4.0, queued_prompt_tokens=90.0, prompt_tokens=620.0, finished_requests=9.0)
    grown = increment(before, after, Thresholds(wait=1.0))
    assert (grown.requests, grown.prompt_tokens) == (6, 170)


def test_first_tokens_are_counted_against_the_threshold(kit):
    before = sample(first_token_waits=kit.waits(quick=10.0, late=1.0))
    after = sample(first_token_waits=kit.waits(quick=16.0, late=5.0))
    grown = increment(before, after, Thresholds(wait=1.0))
    assert (grown.first_tokens, grown.late_first_tokens) == (10, 4)


@pytest.mark.parametrize(("threshold", "above"), [(0.0, 10), (0.25, 8), (0.5, 6), (0.75, 5), (1.0, 4), (9.0, 1)])
def test_observations_are_spread_evenly_within_a_bucket(threshold, above):
    histogram = Histogram(bounds=(0.5, 1.0, 2.0, math.inf), counts=(4.0, 6.0, 9.0, 10.0))
    assert share_above(histogram, threshold) == above
