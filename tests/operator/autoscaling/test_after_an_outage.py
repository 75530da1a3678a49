"""Arrivals during a gap without ticks do not count as one burst."""

import pytest

from quire_operator.autoscaling.demand import Reason


def busy(kit, second: float, *, late_share: float = 0.0, age: float | None = 0.0):
    """Return a replica under a steady load that is busy half the time, with its counters at this second."""
    tokens, firsts = 100.0 * second, 4.0 * second
    return kit.ready(
        "a",
        age=age,
        running=2,
        arrived_requests=4 * second,
        arrived_prompt_tokens=tokens,
        prompt_tokens=tokens,
        generation_tokens=200 * second,
        finished_requests=4 * second,
        steps=100 * second,
        busy_seconds=0.5 * second,
        first_token_waits=kit.waits(quick=firsts * (1 - late_share), late=firsts * late_share),
    )


def need_of_work(decision) -> float:
    return next(term.need for term in decision.terms if term.reason is Reason.WORK)


@pytest.mark.parametrize("outage_ticks", [1, 2, 4, 8, 40])
def test_steady_load_needs_equal_replicas_after_an_outage(kit, outage_ticks: int):
    story, second = kit.story(current=1), 0
    for _ in range(20):
        second += 15
        before = story.tick(busy(kit, second))
    for _ in range(outage_ticks):
        second += 15
        story.tick(busy(kit, second, age=None))
    after = story.tick(busy(kit, second + 15))
    assert need_of_work(after) == pytest.approx(need_of_work(before), rel=0.02)
    assert after.desired == before.desired == 1


def test_counters_of_every_second_tick_are_counted_fully(kit):
    each, other, second = kit.story(current=1), kit.story(current=1), 0
    for _ in range(20):
        second += 15
        each.tick(busy(kit, second))
        other.tick(busy(kit, second))
    for _ in range(10):
        second += 30
        each.tick(busy(kit, second - 15))
        every = each.tick(busy(kit, second))
        other.tick(busy(kit, second - 15, age=15.0))
        half = other.tick(busy(kit, second))
    assert need_of_work(half) == pytest.approx(need_of_work(every), rel=0.02)
