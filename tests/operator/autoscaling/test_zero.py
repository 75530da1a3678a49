"""To zero replicas and back: only if all gateways report no requests, and at once for a new request."""

import pytest

from quire_operator.api import AutoscalingMode, ScaleDown, ScaleToZero, ScaleUp
from quire_operator.autoscaling.demand import Reason

QUICK = ScaleDown.steps(window_seconds=30.0, max_step=1, period_seconds=15.0)
QUIET = {"held": 0, "in_flight": 0}


def test_held_requests_wake_a_model_at_zero(kit):
    story = kit.story(current=0, min_replicas=0)
    assert story.tick(held=0).desired == 0
    decision = story.tick(held=1, after=1.0)
    assert (decision.desired, decision.reason) == (1, Reason.HELD)
    assert decision.message == "0 → 1: HeldRequests needs 0.12 replicas (1 requests held by the gateway)"


@pytest.mark.parametrize(
    "up",
    [
        ScaleUp.steps(window_seconds=300, max_percent=100, max_step=4, period_seconds=15),
        ScaleUp.steps(window_seconds=0, max_percent=100, max_step=0, period_seconds=15),
        ScaleUp.steps(window_seconds=60, max_percent=0, max_step=1, period_seconds=3600),
    ],
    ids=["window", "percent of nothing", "both"],
)
def test_first_replica_waits_for_no_window_and_no_step(kit, up):
    story = kit.story(current=0, min_replicas=0, up=up)
    story.ticks(3, **QUIET)
    assert story.tick(held=1, after=1.0).desired == 1


def test_second_replica_respects_scale_up_limits(kit):
    up = ScaleUp.steps(window_seconds=0, max_percent=0, max_step=1, period_seconds=60)
    story = kit.story(current=0, min_replicas=0, up=up)
    assert story.tick(held=500).desired == 1
    limited = story.tick(kit.loading("a"), held=500)
    assert (limited.desired, limited.reason) == (1, Reason.SCALE_UP_LIMIT)


def test_starting_operator_wakes_a_model_with_held_requests(kit):
    story = kit.story(current=0, min_replicas=0)
    story.tick(**QUIET)
    story.restart()
    assert story.tick(held=1).desired == 1


def test_no_decision_at_zero_if_no_gateway_answers(kit):
    decision = kit.story(current=0, min_replicas=0).tick(held=None)
    assert (decision.desired, decision.reason) == (0, Reason.NO_GATEWAY)
    assert decision.message == "stays at 0: no gateway reports whether requests are held"


def test_idle_model_scales_to_zero_after_the_window(kit):
    story = kit.story(current=1, min_replicas=0)
    story.ticks(20, kit.ready("a"), **QUIET)
    assert story.target == 1
    last = story.ticks(2, kit.ready("a"), **QUIET)[0]
    assert (last.desired, last.reason) == (0, Reason.DEMAND_FELL)
    assert last.message == ("1 → 0: at most 0.00 replicas were needed in the last 5m; no requests run, wait or arrive")


def test_last_replica_stays_for_the_configured_idle_time(kit):
    story = kit.story(current=2, min_replicas=0, to_zero=ScaleToZero(after_seconds=1800), down=QUICK)
    story.ticks(10, *kit.fleet(2), **QUIET)
    assert story.target == 1, "only the last replica waits"
    held = story.ticks(100, kit.ready("a"), **QUIET)[-1]
    assert (held.desired, held.reason) == (1, Reason.SCALE_DOWN_WINDOW)
    story.ticks(15, kit.ready("a"), **QUIET)
    assert story.target == 0


def test_request_restarts_the_idle_time_of_the_last_replica(kit):
    story = kit.story(current=1, min_replicas=0, to_zero=ScaleToZero(after_seconds=1800), down=QUICK)
    story.ticks(100, kit.ready("a"), **QUIET)
    story.tick(kit.ready("a", running=1), **QUIET)
    story.ticks(100, kit.ready("a"), **QUIET)
    assert story.target == 1
    story.ticks(25, kit.ready("a"), **QUIET)
    assert story.target == 0


def test_idle_time_of_the_last_replica_restarts_with_the_operator(kit):
    story = kit.story(current=1, min_replicas=0, to_zero=ScaleToZero(after_seconds=1800), down=QUICK)
    story.ticks(100, kit.ready("a"), **QUIET)
    story.restart()
    story.ticks(100, kit.ready("a"), **QUIET)
    assert story.target == 1


def test_streaming_request_prevents_scaling_to_zero(kit):
    story = kit.story(current=1, min_replicas=0, max_sequences=1000)
    story.ticks(60, kit.ready("a", running=1), **QUIET)
    assert story.target == 1


def test_requests_held_by_gateways_prevent_scaling_to_zero(kit):
    story = kit.story(current=1, min_replicas=0)
    story.ticks(60, kit.ready("a", age=40.0), held=0, in_flight=1)
    assert story.target == 1
    assert story.decisions[-1].message == (
        "stays at 1: Activity needs 0.01 replicas (0 requests since the last tick, 1 in flight at the gateways)"
    )


def test_requests_between_polls_keep_the_last_replica(kit):
    """Each ends before the next tick; only the counter of arrivals shows it."""
    story = kit.story(current=1, min_replicas=0)
    for look in range(60):
        story.tick(kit.ready("a", arrived_requests=float(look // 8), finished_requests=float(look // 8)), **QUIET)
    assert story.target == 1


def test_last_replica_stays_while_a_gateway_is_silent(kit):
    """No gateway would hold the next request, and requests in progress at the missing one are unknown."""
    story = kit.story(current=1, min_replicas=0)
    story.ticks(30, kit.ready("a"), held=0)
    assert (story.target, story.decisions[-1].reason) == (1, Reason.NO_GATEWAY)
    assert story.tick(kit.ready("a"), **QUIET).desired == 0


def test_silent_gateways_stop_only_the_last_step_down(kit):
    story = kit.story(current=4, min_replicas=0, down=ScaleDown.steps(window_seconds=60, max_step=4, period_seconds=15))
    story.ticks(6, *kit.fleet(4))
    assert story.target == 1


def test_starting_replica_stays_although_its_client_left(kit):
    story = kit.story(current=0, min_replicas=0)
    assert story.tick(held=1).desired == 1
    story.ticks(60, kit.loading("a"), **QUIET)
    assert story.target == 1
    story.ticks(20, kit.ready("a"), **QUIET)
    assert story.target == 1
    story.ticks(2, kit.ready("a"), **QUIET)
    assert story.target == 0


def test_streams_of_a_draining_replica_request_no_new_one(kit):
    story = kit.story(current=0, min_replicas=0)
    story.ticks(10, held=0, in_flight=2)
    assert story.target == 0


def test_recommend_mode_never_wakes_a_model(kit):
    story = kit.story(current=0, min_replicas=0, mode=AutoscalingMode.RECOMMEND)
    decision = story.tick(held=3)
    assert (decision.desired, decision.enforced, story.target) == (1, False, 0)
