"""HPA: the examples of https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/."""

import pytest

from benchmarks.autoscaling.policies.hpa import (
    SCALE_DOWN,
    SCALE_UP,
    Controller,
    HpaConfig,
    HpaScaler,
    Rules,
    Step,
    Tolerances,
    Unit,
    replicas_for_average_value,
    replicas_for_pods_metric,
)
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample


def pods(*values: float) -> dict[str, float]:
    return {f"pod-{n}": value for n, value in enumerate(values)}


@pytest.mark.parametrize(
    ("values", "target", "replicas"),
    [
        pytest.param((200.0,), 100.0, 2, id="200m against 100m doubles"),
        pytest.param((50.0, 50.0), 100.0, 1, id="50m against 100m halves"),
        pytest.param((109.0, 109.0), 100.0, 2, id="within a tenth: nothing"),
        pytest.param((91.0, 91.0), 100.0, 2, id="within a tenth below: nothing"),
        pytest.param((112.0, 112.0), 100.0, 3, id="beyond a tenth: rounded up"),
    ],
)
def test_replicas_follow_the_ratio(values: tuple[float, ...], target: float, replicas: int) -> None:
    assert replicas_for_pods_metric(pods(*values), target=target, current=len(values)) == replicas


def test_tolerance_of_five_percent_scales_up_at_106_not_at_104() -> None:
    up = Tolerances(up=0.05)
    assert replicas_for_pods_metric(pods(106.0), target=100.0, current=1, tolerances=up) == 2
    assert replicas_for_pods_metric(pods(104.0), target=100.0, current=1, tolerances=up) == 1


@pytest.mark.parametrize(
    ("values", "missing", "pending", "replicas"),
    [
        pytest.param((400.0,), {"m"}, (), 4, id="up: a missing pod counts as empty"),
        pytest.param((150.0,), {"m"}, (), 2, id="up: that would turn the direction, so nothing"),
        pytest.param((10.0, 10.0), {"m"}, (), 2, id="down: a missing pod counts as at its target"),
        pytest.param((85.0,), {"m"}, (), 2, id="down: within the tolerance with it, so nothing"),
        pytest.param((400.0,), (), {"p"}, 4, id="up: a pending pod counts as empty"),
        pytest.param((50.0, 50.0), (), {"p"}, 1, id="down: a pending pod does not count"),
    ],
)
def test_pods_without_metrics_dampen(
    values: tuple[float, ...], missing: set[str], pending: set[str], replicas: int
) -> None:
    current = len(values) + len(missing) + len(pending)
    assert (
        replicas_for_pods_metric(
            pods(*values), target=100.0, current=current, missing=frozenset(missing), pending=frozenset(pending)
        )
        == replicas
    )


def test_missing_metrics_change_nothing() -> None:
    assert replicas_for_pods_metric({}, target=100.0, current=3, missing=frozenset("abc")) is None
    assert Controller(minimum=1, maximum=10).settle(None, 3, 0.0) == 3


def test_external_average_is_the_total_over_the_target() -> None:
    assert replicas_for_average_value(30.0, target=5.0, current=2) == 6
    assert replicas_for_average_value(21.0, target=5.0, current=4) == 4, "5 % over is within the tolerance"


def test_up_doubles_or_adds_four_in_each_fifteen_seconds() -> None:
    controller = Controller(minimum=1, maximum=100)
    asked, now = 1, 0.0
    steps = []
    while asked < 50:
        asked = controller.settle(50, asked, now)
        steps.append(asked)
        now += 15.0
    assert steps == [5, 10, 20, 40, 50]


def test_scale_down_from_eighty_to_ten_slows_by_its_percentage() -> None:
    rules = Rules(
        window_seconds=0.0,
        policies=(
            Step(unit=Unit.PODS, value=4, period_seconds=60),
            Step(unit=Unit.PERCENT, value=10, period_seconds=60),
        ),
    )
    controller = Controller(down=rules, minimum=1, maximum=100)
    asked, seen = 80, []
    for minute in range(10):
        asked = controller.settle(10, asked, minute * 60.0)
        seen.append(asked)
    assert seen[:2] == [72, 64]
    assert all(before - after == 4 for before, after in zip(seen, seen[1:], strict=False) if before <= 40)


def test_a_policy_counts_what_was_already_changed_in_its_period() -> None:
    controller = Controller(
        up=Rules(window_seconds=0.0, policies=(Step(unit=Unit.PODS, value=4, period_seconds=60),)),
        minimum=1,
        maximum=100,
    )
    assert controller.settle(20, 10, 0.0) == 14
    assert controller.settle(20, 14, 15.0) == 14
    assert controller.settle(20, 14, 61.0) == 18


def test_policy_that_allows_the_largest_change_is_selected() -> None:
    rules = Rules(
        window_seconds=0.0,
        policies=(
            Step(unit=Unit.PERCENT, value=20, period_seconds=60),
            Step(unit=Unit.PODS, value=5, period_seconds=60),
        ),
    )
    assert Controller(down=rules, minimum=1, maximum=200).settle(1, 100, 0.0) == 80


def test_scale_down_waits_for_the_highest_recommendation_to_leave() -> None:
    controller = Controller(minimum=1, maximum=100)
    assert controller.settle(10, 10, 0.0) == 10
    asked = [controller.settle(2, 10, now) for now in (15.0, 150.0, 299.0)]
    assert asked == [10, 10, 10]
    assert controller.settle(2, 10, 301.0) == 2


def test_scale_up_waits_for_the_whole_window() -> None:
    up = Rules(window_seconds=60.0, policies=SCALE_UP.policies)
    controller = Controller(up=up, down=SCALE_DOWN, minimum=1, maximum=100)
    assert [controller.settle(4, 2, now) for now in (0.0, 30.0, 59.0)] == [2, 2, 2]
    assert controller.settle(4, 2, 61.0) == 4


def sample(time: float, *, running: float, waiting: float = 0.0, kv: float = 0.0) -> ReplicaSample:
    return ReplicaSample(
        time=time, running=running, waiting=waiting, queued_prompt_tokens=0, kv_tokens_used=kv, kv_tokens_capacity=100
    )


def ready(name: str, reading: ReplicaSample | None) -> ReplicaObservation:
    return ReplicaObservation(name=name, phase=ReplicaPhase.READY, sample=reading)


def test_largest_of_two_metrics_decides() -> None:
    scaler = HpaScaler(HpaConfig(requests_per_pod=10, kv_usage=0.5), minimum=1, maximum=10)
    seen = Observation(replicas=(ready("a", sample(0.0, running=5, kv=100)),), target=1)
    assert scaler.decide(seen, 0.0).replicas == 2


def test_hpa_keeps_replicas_during_a_scrape_outage() -> None:
    scaler = HpaScaler(HpaConfig(requests_per_pod=10), minimum=1, maximum=10)
    old = Observation(replicas=(ready("a", sample(0.0, running=50)),), target=1)
    assert scaler.decide(old, 60.0).replicas == 1, "a series that ended is no metric"
    assert scaler.decide(old, 5.0).replicas == 5
