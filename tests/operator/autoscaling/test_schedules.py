"""Bounds at recurring times: which apply when, how replicas are ready in time, and what is said of it."""

from datetime import UTC, datetime

import pytest

from quire_operator.api import Schedule
from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.history import USUAL_SECONDS, ScalingRecord
from quire_operator.autoscaling.schedules import MARGIN_SECONDS, bounds_at

START_UP = 300.0
LEAD = START_UP + MARGIN_SECONDS


def monday(hour: int, minute: int = 0) -> float:
    return datetime(2026, 3, 2, hour, minute, tzinfo=UTC).timestamp()


def schedule(cron: str, hours: float, least: int | None = None, most: int | None = None) -> Schedule:
    return Schedule(cron=cron, duration_seconds=hours * 3600, min_replicas=least, max_replicas=most)


DAY = schedule("0 8 * * 1-5", 10, 4, 12)
CAMPAIGN = schedule("0 12 2 3 *", 2, 8, 20)
NIGHT = schedule("0 22 * * *", 8, 0, 1)
SHORT = schedule("2 8 * * *", 1 / 30, 6, 6)


@pytest.mark.parametrize(
    ("schedules", "now", "bounds", "index"),
    [
        ((), monday(9), (2, 5), None),
        ((DAY,), monday(7), (2, 5), None),
        ((DAY,), monday(8), (4, 12), 0),
        ((DAY,), monday(18) - 1, (4, 12), 0),
        ((DAY,), monday(18), (2, 5), None),
        # What a schedule does not say stays as outside of it.
        ((schedule("0 8 * * *", 1, least=3),), monday(8), (3, 5), 0),
        ((schedule("0 8 * * *", 1, most=9),), monday(8), (2, 9), 0),
        # The first in the list wins, as a whole, whichever has more.
        ((DAY, CAMPAIGN), monday(12, 30), (4, 12), 0),
        ((CAMPAIGN, DAY), monday(12, 30), (8, 20), 0),
        ((CAMPAIGN, DAY), monday(14), (4, 12), 1),
        # A higher minimum comes early by as long as replicas take to start; a lower one, and a maximum, do not.
        ((DAY,), monday(8) - LEAD - 1, (2, 5), None),
        ((DAY,), monday(8) - LEAD, (4, 5), 0),
        ((NIGHT,), monday(22) - 1, (2, 5), None),
        ((schedule("0 8 * * *", 1, 9, 12),), monday(8) - 1, (9, 9), 0),
        # The end of a window that lowered the minimum comes early as well.
        ((NIGHT,), monday(6) - LEAD - 1, (0, 1), 0),
        ((NIGHT,), monday(6) - LEAD, (2, 2), 0),
        # So does a window that is over before the lead is.
        ((SHORT, DAY), monday(8) - 200, (6, 6), 1),
    ],
)
def test_bounds_at_a_time(kit, schedules, now, bounds, index):
    rules = kit.policy(min_replicas=2, max_replicas=5, schedules=schedules).autoscaling
    found = bounds_at(rules, now, start_up_seconds=START_UP)
    assert (found.min_replicas, found.max_replicas) == bounds
    assert (None if found.schedule is None else found.schedule.index) == index
    assert (found.why is None) == (index is None)


def test_bounds_report_the_end_of_the_schedule(kit):
    rules = kit.policy(schedules=(CAMPAIGN, DAY)).autoscaling
    until = {hour: bounds_at(rules, monday(hour), start_up_seconds=60).schedule for hour in (9, 13, 15)}
    assert [(hour, found.index, found.end) for hour, found in until.items() if found is not None] == [
        (9, 1, monday(12)),
        (13, 0, monday(14)),
        (15, 1, monday(18)),
    ]


def test_assumed_start_up_leads_until_one_was_learned(kit):
    rules = kit.policy(schedules=(DAY,)).autoscaling
    lead = USUAL_SECONDS + MARGIN_SECONDS
    assert bounds_at(rules, monday(8) - lead, start_up_seconds=None).min_replicas == 4
    assert bounds_at(rules, monday(8) - lead - 1, start_up_seconds=None).min_replicas == 1


def test_next_change_visits_every_change_of_the_bounds(kit):
    """A pass that sleeps until the next change misses none: minute by minute the bounds are those of the last pass."""
    rules = kit.policy(min_replicas=2, max_replicas=5, schedules=(CAMPAIGN, DAY, NIGHT)).autoscaling
    now = monday(0)
    found = bounds_at(rules, now, start_up_seconds=START_UP)
    for minute in range(24 * 60):
        time = monday(0) + 60 * minute
        while found.next_change is not None and found.next_change <= time:
            assert found.next_change > now
            now = found.next_change
            found = bounds_at(rules, now, start_up_seconds=START_UP)
        seen = bounds_at(rules, time, start_up_seconds=START_UP)
        assert (seen.min_replicas, seen.max_replicas) == (found.min_replicas, found.max_replicas)


def test_scheduled_minimum_applies_one_start_up_time_early(kit):
    story = kit.story(current=1, schedules=(DAY,))
    story.history = story.history.restored(ScalingRecord(desired_replicas=1, start_up_seconds=int(START_UP)))
    story.time = monday(8) - LEAD - 30
    early = story.tick(kit.ready("r0"))
    assert early.desired == 1
    raised = story.tick(kit.ready("r0"))
    assert (raised.desired, raised.reason, raised.bounds) == (4, Reason.SCHEDULE, (4, 10))
    assert story.time + START_UP <= monday(8)


def test_scheduled_minimum_is_the_reason_for_keeping_replicas(kit):
    story = kit.story(current=4, schedules=(DAY,))
    story.time = monday(9)
    decision = story.tick(*kit.fleet(4))
    assert (decision.desired, decision.reason, decision.bounds) == (4, Reason.SCHEDULE, (4, 12))


def test_scale_down_after_a_schedule_keeps_its_limits(kit):
    story = kit.story(current=4, schedules=(DAY,))
    story.time = monday(17, 50)
    before = story.ticks(39, *kit.fleet(4))
    assert {(d.desired, d.reason) for d in before} == {(4, Reason.SCHEDULE)}
    after = story.tick(*kit.fleet(4))
    assert (after.desired, after.reason) == (3, Reason.DEMAND_FELL)


def test_scheduled_maximum_removes_replicas_at_once(kit):
    story = kit.story(current=3, min_replicas=0, schedules=(NIGHT,))
    story.time = monday(22) - 15
    decision = story.tick(*kit.fleet(3, running=9), held=0, in_flight=9)
    assert (decision.desired, decision.reason) == (1, Reason.SCHEDULE)
    assert len(decision.victims) == 2


def test_demand_moves_replicas_within_the_scheduled_bounds(kit):
    story = kit.story(current=5, max_replicas=5, schedules=(DAY,))
    story.time = monday(9)
    assert story.tick(*kit.fleet(5, running=10, waiting=100)).desired == 10
    assert story.tick(*kit.fleet(10, running=10, waiting=100)).desired == 12
    full = story.tick(*kit.fleet(12, running=10, waiting=100))
    assert (full.desired, full.reason) == (12, Reason.AT_MAX)
