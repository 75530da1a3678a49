"""One test for each common complaint about other autoscalers."""

import pytest

from quire_operator.autoscaling.demand import Reason
from quire_operator.autoscaling.observation import ReplicaPhase


def test_dead_scrape_is_not_read_as_idle(kit):
    story = kit.story(current=4)
    story.ticks(25, *kit.fleet(4, running=8))
    for _ in range(100):
        decision = story.tick(*(kit.ready(f"r{n}", age=None) for n in range(4)))
        assert decision.desired == 4
    assert decision.reason is Reason.METRICS_STALE
    assert decision.message == "stays at 4: only 0 of 4 ready replicas reported metrics in the last 45 s"


def test_demand_unseen_in_an_outage_counts_as_full_afterwards(kit):
    story = kit.story(current=4)
    story.ticks(25, *kit.fleet(4, running=8))
    story.ticks(8, *(kit.ready(f"r{n}", age=None) for n in range(4)))
    # Idle again at once, but demand within the window is unknown.
    assert {decision.desired for decision in story.ticks(20, *kit.fleet(4))} == {4}
    assert story.tick(*kit.fleet(4)).desired == 3


def test_series_of_deleted_pods_do_not_count(kit):
    story = kit.story(current=2, max_replicas=2)
    story.tick(kit.ready("a", running=8), kit.ready("gone", running=10, waiting=90))
    decision = story.tick(kit.ready("a", running=8), kit.ready("b", running=0))
    assert decision.desired == 2
    assert decision.inputs["running"] == 8
    assert decision.inputs["waiting"] == 0


def test_one_queue_causes_one_scale_up_while_replicas_load(kit):
    story = kit.story(current=1)
    first = story.tick(kit.ready("a", running=10, waiting=22))
    assert (first.desired, first.reason) == (4, Reason.CONCURRENCY)

    busy = kit.ready("a", running=10, waiting=22)
    later = story.ticks(28, busy, *(kit.loading(name) for name in "bcd"))

    assert {decision.desired for decision in later} == {4}
    assert {decision.reason for decision in later} == {Reason.STARTING}
    assert "3 of 4 still starting" in later[-1].message


def test_growing_queue_does_scale_up_further_while_replicas_load(kit):
    story = kit.story(current=1)
    assert story.tick(kit.ready("a", running=10, waiting=6)).desired == 2
    assert story.tick(kit.ready("a", running=10, waiting=20), kit.loading("b")).desired == 4


def test_operator_restart_keeps_load(kit):
    story = kit.story(current=6)
    story.ticks(25, *kit.fleet(6, running=7))
    story.restart()

    first = story.tick(*kit.fleet(6))
    assert (first.desired, first.reason) == (6, Reason.RESTARTED)
    # Nor at the second tick: earlier demand is unknown for a whole window.
    assert {decision.desired for decision in story.ticks(19, *kit.fleet(6))} == {6}
    assert story.tick(*kit.fleet(6), after=30.0).desired == 5


def test_pause_of_the_operator_is_like_a_restart(kit):
    story = kit.story(current=6)
    story.ticks(25, *kit.fleet(6))
    assert story.tick(*kit.fleet(story.target), after=1000.0).reason is Reason.RESTARTED


def test_replica_with_the_least_work_is_removed_first(kit):
    story = kit.story(current=4)
    story.ticks(
        25,
        kit.ready("busy", running=5, kv_tokens_used=100.0),
        kit.ready("full", running=1, kv_tokens_used=3000.0),
        kit.ready("light", running=1, kv_tokens_used=200.0),
        kit.ready("later", running=6),
    )
    change = next(decision for decision in story.decisions if decision.is_change)
    assert (change.desired, change.victims) == (3, ("light",))


def test_unready_replica_is_removed_before_a_serving_one(kit):
    story = kit.story(current=3)
    pending = kit.replica(name="p", phase=ReplicaPhase.PENDING, age=None)
    story.ticks(25, kit.ready("a"), kit.ready("b"), pending)
    change = next(decision for decision in story.decisions if decision.is_change)
    assert change.victims == ("p",)


@pytest.mark.parametrize(
    ("full", "reason"),
    [
        ({"running": 10}, Reason.CONCURRENCY),
        ({"running": 3, "kv_tokens_used": 9500.0}, Reason.KV_DEMAND),
        ({"running": 3, "kv_tokens_used": 4000.0, "queued_prompt_tokens": 5000.0}, Reason.KV_DEMAND),
    ],
)
def test_full_replica_scales_up_without_a_target(kit, full, reason):
    decision = kit.story(current=1).tick(kit.ready("a", **full))
    assert (decision.desired, decision.reason) == (2, reason)


def test_replicas_are_removed_step_by_step_after_a_burst(kit):
    story = kit.story(current=1)
    story.tick(kit.ready("a", running=10, waiting=60))
    story.tick(kit.ready("a", running=10, waiting=60))
    assert story.target == 9
    for _ in range(80):
        story.tick(*kit.fleet(story.target, running=0.2))
    assert story.target == 1
    falls = [d for d in story.decisions if d.desired < d.current]
    assert [d.current - d.desired for d in falls] == [1] * 8
    assert {d.reason for d in falls} == {Reason.DEMAND_FELL}
    assert min(b.time - a.time for a, b in zip(falls, falls[1:], strict=False)) >= 60


def test_replicas_set_by_another_client_are_the_new_baseline(kit):
    story = kit.story(current=3)
    story.ticks(10, *kit.fleet(3, running=6))
    # An HPA, or a user, requests seven.
    story.target = 7
    decision = story.tick(*kit.fleet(3, running=6))
    assert (decision.current, decision.desired) == (7, 7)


@pytest.mark.parametrize(("figures", "settles_at"), [({"running": 9.0}, 5), ({"running": 0.0}, 1)])
def test_empty_queue_distinguishes_busy_from_idle(kit, figures, settles_at):
    """The queue depth is 0 in both cases."""
    story = kit.story(current=4, queue_depth=4)
    total = figures["running"] * 4
    for _ in range(60):
        story.tick(*kit.fleet(story.target, running=total / story.target))
    assert story.target == settles_at


def test_switch_from_six_static_replicas_never_drops_on_the_way(kit):
    story = kit.story(current=None)
    first = story.tick(*kit.fleet(6, running=7))
    assert (first.current, first.desired) == (6, 6)
    assert first.record.desired_replicas == 6


def test_missing_metrics_of_one_replica_do_not_scale_down(kit):
    story = kit.story(current=4)
    story.ticks(25, *kit.fleet(4, running=1)[:3], kit.ready("r3", age=None))
    assert story.target == 4
    assert story.decisions[-1].reason is Reason.METRICS_PARTIAL
    assert "1 of 4 ready replicas reported no metrics" in story.decisions[-1].message


@pytest.mark.parametrize(
    ("current", "running", "least", "reason", "words"),
    [
        # Both could be one fewer if the one without metrics were idle.
        (
            2,
            1,
            1,
            Reason.METRICS_PARTIAL,
            "1 of 2 ready replicas reported no metrics, and may be full; Concurrency needs 0.12",
        ),
        (
            4,
            7,
            1,
            Reason.METRICS_PARTIAL,
            "1 of 4 ready replicas reported no metrics, and may be full; Concurrency needs 2.62",
        ),
        # The others need as many, or may not be fewer.
        (4, 9, 1, Reason.STEADY, "stays at 4: Concurrency needs 3.38"),
        (2, 1, 2, Reason.STEADY, "stays at 2: Concurrency needs 0.12"),
    ],
)
def test_replica_kept_for_missing_metrics_is_explained(kit, current, running, least, reason, words):
    story = kit.story(current=current, min_replicas=least)
    others, silent = kit.fleet(current - 1, running=running), kit.ready("silent", age=None)
    decision = story.ticks(30, *others, silent)[-1]
    assert (decision.desired, decision.reason) == (current, reason)
    assert words in decision.message
