"""Replicas that start, stop, die, slow down or cannot be scraped, and the gateway in front of them."""

import pytest

from quire_cli.simulation.fleet import Crash, ScrapeOutage, SlowReplicas
from quire_cli.simulation.results import HoldingStep, Outcome
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import ReplicaPhase

LONG = (0.0, 100, 3000)  # 330 s on its own


def phases(story, time):
    (observation,) = [seen for now, seen in story.script.seen if now == time]
    return [replica.phase for replica in observation.replicas]


def test_replica_is_ready_after_its_start_up_delay(play):
    story = play(LONG, (39.9, 100, 1), (40.1, 100, 1), script={10.0: 2}, max_replicas=2)
    assert [r.replica for r in story.run.requests] == ["replica-0", "replica-0", "replica-1"]
    assert phases(story, 10.0) == [ReplicaPhase.READY]
    assert phases(story, 20.0) == [ReplicaPhase.READY, ReplicaPhase.LOADING]
    assert phases(story, 50.0) == [ReplicaPhase.READY] * 2


def test_start_up_delays_vary_by_the_seed_alone(play):
    def ready_by(seed):
        story = play(LONG, script={10.0: 8}, startup_jitter=0.1, seed=seed, timeline_seconds=0.1)
        return tuple(p.time for p in story.run.timeline if p.ready == 8)[0]

    moments = [ready_by(seed) for seed in (1, 1, 2, 3, 4)]
    assert moments[0] == moments[1] and len(set(moments)) > 2
    assert all(10 + 0.9 * 30 <= moment <= 10 + 1.1 * 30 + 0.1 for moment in moments)


def test_pending_and_draining_replicas_hold_their_hardware(play):
    # The second is requested at 10 s and dropped at 20 s before it is ready; the other drains its request.
    run = play((0.0, 100, 300), (55.0, 100, 1), script={10.0: 2, 20.0: 1}).run
    assert run.holding == (HoldingStep(0.0, 1), HoldingStep(10.0, 2), HoldingStep(20.0, 1))


def test_removed_replica_finishes_its_requests(play):
    story = play((0.0, 100, 300), (0.0, 100, 300), (30.0, 100, 1), script={10.0: 1}, initial_replicas=2)
    first, second, third = story.run.requests
    assert {first.replica, second.replica} == {"replica-0", "replica-1"}
    assert [r.outcome for r in story.run.requests] == [Outcome.FINISHED] * 3
    assert third.replica == "replica-0"
    assert story.run.holding[-1] == HoldingStep(pytest.approx(0.2 + 299 * 0.11), 1)
    assert phases(story, 20.0) == [ReplicaPhase.READY, ReplicaPhase.DRAINING]


def test_requests_beyond_the_drain_timeout_fail(play):
    run = play(LONG, LONG, script={10.0: 1}, initial_replicas=2, drain_seconds=100.0).run
    assert sorted(r.outcome for r in run.requests) == [Outcome.FAILED, Outcome.FINISHED]
    assert run.holding[-1] == HoldingStep(110.0, 1)


def test_scaler_decisions_are_clamped_to_the_bounds(play):
    run = play((0.0, 100, 500), script={10.0: 99, 30.0: 0}, max_replicas=3, min_replicas=1).run
    assert [(d.time, d.desired) for d in run.decisions[:4]] == [(10.0, 3), (20.0, 3), (30.0, 1), (40.0, 1)]
    assert run.changes == 0, "all of them come after the last arrival"


def test_requests_are_held_while_no_replica_is_ready(play):
    run = play((5.0, 100, 1), (6.0, 100, 1), script={10.0: 1}, initial_replicas=0, min_replicas=0).run
    assert [r.first_token for r in run.requests] == [pytest.approx(40.0 + 0.3)] * 2
    assert run.worst_queue == 1


def test_request_held_too_long_fails(play):
    run = play((5.0, 100, 1), (15.0, 100, 1), script={10.0: 1}, initial_replicas=0, hold_seconds=30.0).run
    assert [r.outcome for r in run.requests] == [Outcome.FAILED, Outcome.FINISHED]


def test_crash_fails_requests_of_the_busiest_replica_which_returns(play):
    story = play(
        *[(float(i), 100, 400) for i in range(4)],
        (25.0, 100, 1),
        (60.0, 100, 300),
        script={},
        initial_replicas=2,
        faults=(Crash(time=20.0),),
    )
    outcomes = [r.outcome for r in story.run.requests]
    assert outcomes[:4].count(Outcome.FAILED) == 2
    assert outcomes[4:] == [Outcome.FINISHED] * 2
    assert [p.ready for p in story.run.timeline[:5]] == [2, 1, 1, 1, 2], "30 s after the crash"
    died = story.run.requests[outcomes.index(Outcome.FAILED)].replica
    totals = [
        replica.sample.arrived_requests
        for _, seen in story.script.seen
        for replica in seen.replicas
        if replica.name == died and replica.sample
    ]
    assert totals[0] == 2 and totals[1] == 0, "its counters start again"
    assert story.run.holding == (HoldingStep(0.0, 2),), "it holds its hardware meanwhile"


def test_nothing_can_be_scraped_during_an_outage(play):
    story = play(LONG, faults=(ScrapeOutage(start=20.0, seconds=20.0),))
    assert [seen.replicas[0].sample is None for _, seen in story.script.seen[:4]] == [False, True, True, False]


def test_slow_replicas_take_longer_while_the_fault_lasts(play):
    requests = [(0.0, 100, 1), (50.0, 100, 1), (100.0, 100, 1)]
    run = play(*requests, faults=(SlowReplicas(start=40.0, seconds=20.0, factor=3.0),)).run
    assert [r.first_token - r.arrival for r in run.requests] == [pytest.approx(s) for s in (0.2, 0.6, 0.2)]


def test_slow_replica_stays_slow_after_a_crash(play):
    faults = (SlowReplicas(start=10.0, seconds=100.0, factor=3.0), Crash(time=20.0))
    run = play((60.0, 100, 1), (120.0, 100, 1), faults=faults).run
    assert [r.first_token - r.arrival for r in run.requests] == [pytest.approx(s) for s in (0.6, 0.2)]


def test_replica_can_slow_down_during_decoding(play):
    run = play((0.0, 100, 101), faults=(SlowReplicas(start=5.2, seconds=100.0, factor=2.0),)).run
    before = 46  # steps of 0.11 s started by 5.2 s
    assert run.requests[0].finish == pytest.approx(0.2 + before * 0.11 + (100 - before) * 0.22)


def test_requests_go_to_the_replica_with_the_least_wait(play):
    run = play(*[(0.01 * i, 100, 50) for i in range(6)], initial_replicas=3).run
    replicas = [r.replica for r in run.requests]
    assert sorted(replicas) == sorted(["replica-0", "replica-1", "replica-2"] * 2)


def test_prompt_goes_to_the_replica_with_its_prefix(play):
    prefixes = [(n, n + 100) for n in range(1, 5)] * 3
    run = play(*[Request(10.0 * i, 1100, 2, prefix) for i, prefix in enumerate(prefixes)], initial_replicas=4).run
    homes = {}
    for request, prefix in zip(run.requests, prefixes, strict=True):
        assert homes.setdefault(prefix, request.replica) == request.replica
    assert sum(r.cached_tokens for r in run.requests) == 8 * 1024


def test_a_scaler_sees_the_last_scrape_before_its_tick(play):
    script_class = type(play(LONG).script)
    story = play(LONG, script=script_class(period_seconds=10.0, scrape_seconds=7.0))
    ages = [now - seen.replicas[0].sample.time for now, seen in story.script.seen]
    assert all(0 <= age < 7.0 for age in ages) and len({round(age, 6) for age in ages}) > 3


def test_timeline_has_the_requested_resolution(play):
    run = play((0.0, 100, 100), timeline_seconds=0.5).run
    assert [p.time for p in run.timeline[:3]] == [0.0, 0.5, 1.0]
    assert run.timeline[1].running == 1


def test_empty_workload_gives_an_empty_result(play):
    run = play().run
    assert run.requests == () and run.attainment() == 1.0 and run.replica_hours == 0.0


def test_request_at_zero_wakes_the_autoscaler_between_ticks(play):
    story = play((12.0, 100, 1), script={12.1: 1}, initial_replicas=0, min_replicas=0, wake_seconds=0.5)
    assert [now for now, _ in story.script.seen[:2]] == [10.0, 12.5]
    woken = story.script.seen[1][1]
    assert (woken.target, woken.held_requests, woken.in_flight_requests) == (0, 1, 0)
    assert story.run.requests[0].first_token == pytest.approx(12.5 + 30.0 + 0.2)


def test_gateways_are_polled_only_if_scaling_to_zero(play):
    story = play((0.0, 100, 500), (1.0, 100, 500))
    assert {(seen.held_requests, seen.in_flight_requests) for _, seen in story.script.seen} == {(None, None)}
    may_sleep = play((0.0, 100, 500), (1.0, 100, 500), min_replicas=0)
    assert may_sleep.script.seen[0][1].in_flight_requests == 2


def test_full_queue_sends_requests_to_another_replica_if_any(play):
    queue = {"kv_tokens": 160, "max_queued_kv_caches": 2, "max_sequences": 1}
    # One runs, and 320 tokens may wait: three prompts of 100.
    crowd = [(0.001 * n, 100, 50) for n in range(6)]
    alone = play((0.0, 100, 50), *[(0.01 + t, p, o) for t, p, o in crowd], engine=queue).run
    assert [r.outcome for r in alone.requests].count(Outcome.FAILED) == 3
    both = play((0.0, 100, 50), *[(0.01 + t, p, o) for t, p, o in crowd], engine=queue, initial_replicas=2).run
    assert {r.outcome for r in both.requests} == {Outcome.FINISHED}


def test_waiting_requests_are_limited(play):
    run = play(*[(0.0, 10, 50)] * 9, engine={"max_sequences": 1, "max_queued_requests": 4}).run
    assert [r.outcome for r in run.requests].count(Outcome.FINISHED) == 4
