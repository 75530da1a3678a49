"""The speed and range of changes of the number of replicas."""

import pytest

from quire_operator.api import AutoscalingMode, PolicyType, ScaleDown, ScaleUp, SelectPolicy, StepPolicy
from quire_operator.autoscaling.demand import Reason


@pytest.mark.parametrize(
    ("current", "percent", "step", "expected"),
    [(1, 100, 4, 5), (8, 100, 4, 16), (8, 25, 1, 10), (3, 0, 1, 4), (10, 15, 0, 12), (0, 100, 2, 2)],
)
def test_scale_up_uses_the_larger_of_percent_and_step(kit, current, percent, step, expected):
    up = ScaleUp.steps(window_seconds=0, max_percent=percent, max_step=step, period_seconds=30)
    story = kit.story(current=current, max_replicas=100, min_replicas=0, up=up)
    crowd = [kit.ready("a", running=10, waiting=2000)] if current else []
    held = 0 if current else 2000
    assert story.tick(*crowd, held=held).desired == expected
    again = story.tick(*crowd, held=held, after=15)
    assert (again.desired, again.reason) == (expected, Reason.SCALE_UP_LIMIT)
    assert story.tick(*crowd, held=held, after=15).desired > expected


PODS, PERCENT = PolicyType.PODS, PolicyType.PERCENT


def limits(kind, *policies, select=SelectPolicy.MAX):
    steps = tuple(StepPolicy(type=t, value=value, period_seconds=period) for t, value, period in policies)
    return kind(window_seconds=0, policies=steps, select=select)


@pytest.mark.parametrize(
    ("current", "policies", "select", "now", "in_half_a_minute", "in_a_minute"),
    [
        # The larger and the smaller of two; the percentage of 10 is rounded up for more, and the rest down for fewer.
        (10, [(PODS, 4, 30), (PERCENT, 25, 30)], SelectPolicy.MAX, 14, 18, 23),
        (10, [(PODS, 4, 30), (PERCENT, 25, 30)], SelectPolicy.MIN, 13, 17, 21),
        # Each policy counts over a period of its own.
        (10, [(PODS, 8, 60), (PERCENT, 10, 30)], SelectPolicy.MIN, 11, 13, 15),
        (10, [(PODS, 4, 60)], SelectPolicy.MAX, 14, 14, 18),
        (10, [(PODS, 4, 60)], SelectPolicy.DISABLED, 10, 10, 10),
    ],
)
def test_scale_up_follows_the_policies_of_behavior(kit, current, policies, select, now, in_half_a_minute, in_a_minute):
    story = kit.story(current=current, max_replicas=100, up=limits(ScaleUp, *policies, select=select))
    crowd = kit.ready("a", running=10, waiting=2000)
    first = story.tick(crowd)
    assert (first.desired, first.reason is Reason.SCALE_UP_LIMIT) == (now, now == current)
    assert story.tick(crowd, after=30).desired == in_half_a_minute
    assert story.tick(crowd, after=30).desired == in_a_minute


@pytest.mark.parametrize(
    ("policies", "select", "expected"),
    [
        ([(PODS, 2, 60)], SelectPolicy.MAX, 7),
        ([(PERCENT, 25, 60)], SelectPolicy.MAX, 6),
        ([(PERCENT, 100, 60)], SelectPolicy.MAX, 1),
        ([(PODS, 1, 60), (PERCENT, 50, 60)], SelectPolicy.MAX, 4),
        ([(PODS, 1, 60), (PERCENT, 50, 60)], SelectPolicy.MIN, 8),
        ([(PODS, 9, 60)], SelectPolicy.DISABLED, 9),
    ],
)
def test_scale_down_follows_the_policies_of_behavior(kit, policies, select, expected):
    story = kit.story(current=9, down=limits(ScaleDown, *policies, select=select))
    story.tick(*kit.fleet(9))
    decision = story.tick(*kit.fleet(9))
    assert decision.desired == expected
    assert decision.reason is (Reason.DEMAND_FELL if expected < 9 else Reason.SCALE_DOWN_LIMIT)


def test_scale_up_waits_for_its_window(kit):
    up = ScaleUp.steps(window_seconds=60, max_percent=100, max_step=4, period_seconds=15)
    story = kit.story(current=1, up=up)
    story.ticks(5, kit.ready("a", running=1))
    crowd = kit.ready("a", running=10, waiting=5)
    held = story.ticks(4, crowd)
    assert {(d.desired, d.reason) for d in held} == {(1, Reason.SCALE_UP_WINDOW)}
    assert story.tick(crowd).desired == 2


def test_at_max_is_the_reason_at_the_maximum(kit):
    story = kit.story(current=3, max_replicas=3)
    decision = story.tick(*kit.fleet(3, running=10, waiting=10))
    assert (decision.desired, decision.reason) == (3, Reason.AT_MAX)


@pytest.mark.parametrize(("bounds", "current", "desired"), [((1, 4), 9, 4), ((3, 5), 1, 3), ((0, 2), 5, 2)])
def test_bounds_apply_at_once_without_metrics(kit, bounds, current, desired):
    story = kit.story(current=current, min_replicas=bounds[0], max_replicas=bounds[1])
    decision = story.tick(*(kit.ready(f"r{n}", age=None) for n in range(current)))
    assert (decision.desired, decision.reason) == (desired, Reason.BOUNDS)


def test_scale_down_removes_at_most_one_step_per_period(kit):
    story = kit.story(current=9, down=ScaleDown.steps(window_seconds=0, max_step=3, period_seconds=60))
    story.tick(*kit.fleet(9))
    story.tick(*kit.fleet(9))
    assert story.target == 6
    limited = story.tick(*kit.fleet(6))
    assert (limited.desired, limited.reason) == (6, Reason.SCALE_DOWN_LIMIT)
    story.ticks(3, *kit.fleet(6))
    assert story.target == 3


def test_scale_down_follows_the_peak_need_of_the_window(kit):
    story = kit.story(current=8, down=ScaleDown.steps(window_seconds=60, max_step=8, period_seconds=15))
    story.tick(*kit.fleet(8, running=3))
    for _ in range(5):
        story.tick(*kit.fleet(8, running=1))
    # 24 running over 0.8 × 10 needed three replicas a minute ago, 8 need one.
    changes = story.history.record.changes
    assert [(c.from_replicas, c.to_replicas) for c in changes] == [(8, 3), (3, 1)]


def test_nothing_is_removed_during_a_rollout(kit):
    story = kit.story(current=3)
    for _ in range(40):
        decision = story.tick(*kit.fleet(3), rolling_out=True)
        assert decision.desired == 3
    assert decision.reason is Reason.ROLLING_OUT
    assert story.tick(*kit.fleet(3)).desired == 2


def test_zero_window_does_not_scale_down_at_the_first_poll(kit):
    story = kit.story(current=3, down=ScaleDown.steps(window_seconds=0, max_step=1, period_seconds=15))
    assert story.tick(*kit.fleet(3)).reason is Reason.RESTARTED
    assert story.tick(*kit.fleet(3)).desired == 2


def test_recommendation_is_recorded_once_and_not_applied(kit):
    story = kit.story(current=1, mode=AutoscalingMode.RECOMMEND)
    decisions = story.ticks(5, kit.ready("a", running=10, waiting=10))
    assert {(d.current, d.desired, d.enforced) for d in decisions} == {(1, 3, False)}
    assert [(c.from_replicas, c.to_replicas) for c in story.history.record.changes] == [(1, 3)]
    assert story.history.record.desired_replicas == 3
    assert story.history.moves == ()


def test_recommendations_respect_scale_down_limits(kit):
    story = kit.story(current=1, mode=AutoscalingMode.RECOMMEND)
    story.tick(kit.ready("a", running=10, waiting=20))
    quiet = story.ticks(19, kit.ready("a", running=2))
    assert {decision.desired for decision in quiet} == {4}
    assert quiet[-1].reason is Reason.SCALE_DOWN_WINDOW
    assert story.ticks(2, kit.ready("a", running=2))[-1].desired == 1
    assert [(c.from_replicas, c.to_replicas) for c in story.history.record.changes] == [(1, 4)]


def test_repeated_recommendation_is_recorded_again(kit):
    story = kit.story(current=1, mode=AutoscalingMode.RECOMMEND)
    for _ in range(2):
        story.tick(kit.ready("a", running=10, waiting=20))
        story.ticks(25, kit.ready("a", running=2))
    assert [(c.from_replicas, c.to_replicas) for c in story.history.record.changes] == [(1, 4), (1, 4)]


def test_recommendation_is_kept_while_metrics_are_missing(kit):
    story = kit.story(current=1, mode=AutoscalingMode.RECOMMEND)
    story.tick(kit.ready("a", running=10, waiting=20))
    blind = story.ticks(60, kit.ready("a", age=None))[-1]
    assert (blind.desired, blind.reason) == (4, Reason.METRICS_STALE)
    assert blind.message == "1 → 4 as before: only 0 of 1 ready replicas reported metrics in the last 45 s"


# --- history ---


def test_record_keeps_the_last_ten_changes(kit):
    story = kit.story(current=1, down=ScaleDown.steps(window_seconds=0, max_step=9, period_seconds=15))
    for _ in range(14):
        story.tick(kit.ready("a", running=10, waiting=10))
        story.tick(*kit.fleet(story.target))
    changes = story.history.record.changes
    assert len(changes) == 10
    assert [c.time for c in changes] == sorted(c.time for c in changes)
    assert changes[-1].to_replicas == story.history.record.desired_replicas


def test_step_limits_survive_a_restart(kit):
    story = kit.story(current=2, max_replicas=50)
    crowd = kit.ready("a", running=10, waiting=1000)
    assert story.tick(crowd).desired == 6
    story.restart()
    limited = story.tick(crowd, after=5)
    assert (limited.desired, limited.reason) == (6, Reason.SCALE_UP_LIMIT)


def test_history_size_is_bounded(kit):
    story = kit.story(current=2)
    story.ticks(500, *kit.fleet(2, running=5))
    assert len(story.history.needs) <= 22
    assert len(story.history.flows) <= 4
    assert len(story.history.samples) == 2
