"""The operator's clock is wrong, is set while it runs, or differs from that of the previous operator."""

import pytest

from quire_operator.api import ScaleDown, ScaleUp
from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.history import MAX_GAP_SECONDS, History

UP = ScaleUp.steps(window_seconds=0.0, max_percent=100, max_step=1, period_seconds=60.0)
DOWN = ScaleDown.steps(window_seconds=0.0, max_step=1, period_seconds=60.0)


def busy_day(kit, *, wrong: float):
    """One replica with a queue causes another, which starts, serves and is removed."""
    story = kit.story(current=1, queue_depth=4, up=UP, down=DOWN)
    story.time += wrong
    story.tick(kit.ready("a", waiting=0.0))
    story.tick(kit.ready("a", waiting=8.0))
    story.ticks(3, kit.ready("a", waiting=8.0), kit.loading("b"))
    story.ticks(20, kit.ready("a"), kit.ready("b"))
    return story


@pytest.mark.parametrize("wrong", [-600.0, 600.0])
def test_constant_clock_offset_changes_no_decision(kit, wrong):
    right, story = busy_day(kit, wrong=0.0), busy_day(kit, wrong=wrong)
    assert [(d.desired, d.reason, d.inputs) for d in story.decisions] == [
        (d.desired, d.reason, d.inputs) for d in right.decisions
    ]
    assert {decision.desired for decision in right.decisions} == {1, 2}
    assert story.history.start_ups.seconds == right.history.start_ups.seconds == (45.0,)
    assert story.history.ramp == right.history.ramp


@pytest.mark.parametrize("set_by", [-86_400.0, -600.0, -16.0, 600.0, 86_400.0])
def test_start_up_with_a_clock_jump_is_ignored(kit, set_by):
    story = kit.story(current=2)
    story.tick(kit.ready("a"))
    story.tick(kit.ready("a"), kit.loading("b"))
    story.tick(kit.ready("a"), kit.loading("b"), after=set_by)
    story.ticks(10, kit.ready("a"), kit.ready("b"))
    assert story.history.start_ups.learnt is None
    assert story.history.record.start_up_seconds is None


@pytest.mark.parametrize("set_by", [-10.0, 60.0, 100.0])
def test_small_clock_jump_changes_a_start_up_by_that_much(kit, set_by):
    story = kit.story(current=2)
    story.tick(kit.ready("a"))
    story.tick(kit.ready("a"), kit.loading("b"))
    story.tick(kit.ready("a"), kit.loading("b"), after=15.0 + set_by)
    story.tick(kit.ready("a"), kit.ready("b"))
    assert story.history.start_ups.seconds == (30.0 + set_by,)
    assert abs(set_by) < MAX_GAP_SECONDS


@pytest.mark.parametrize("behind", [600.0, 86_400.0])
def test_slower_clock_of_a_new_leader_delays_adding_by_a_period(kit, behind):
    first = kit.story(current=1, queue_depth=4, up=UP, down=DOWN)
    first.tick(kit.ready("a", waiting=40.0))
    assert first.target == 2
    second = kit.story(current=2, queue_depth=4, up=UP, down=DOWN, history=History.restored(first.history.record))
    second.time = first.time - behind
    load = kit.fleet(2, waiting=20.0)
    assert second.tick(*load).reason is Reason.SCALE_UP_LIMIT, "what the one before did may have been a moment ago"
    assert [decision.desired for decision in second.ticks(4, *load)] == [2, 2, 2, 4]


@pytest.mark.parametrize("behind", [600.0, 86_400.0])
def test_slower_clock_of_a_new_leader_delays_removal_by_a_period(kit, behind):
    first = kit.story(current=3, down=DOWN)
    first.ticks(2, *kit.fleet(3))
    assert first.target == 2
    second = kit.story(current=2, down=DOWN, history=History.restored(first.history.record))
    second.time = first.time - behind
    decisions = second.ticks(6, *kit.fleet(2))
    assert [decision.desired for decision in decisions] == [2, 2, 2, 2, 1, 1]


@pytest.mark.parametrize("set_by", [-600.0, -86_400.0])
def test_clock_set_back_delays_a_scale_up_by_one_period_at_most(kit, set_by):
    story = kit.story(current=1, queue_depth=4, up=UP, down=DOWN)
    story.tick(kit.ready("a", waiting=40.0))
    load = kit.fleet(2, waiting=20.0)
    story.tick(*load, after=set_by)
    assert [decision.desired for decision in story.ticks(4, *load)] == [2, 2, 2, 4]
