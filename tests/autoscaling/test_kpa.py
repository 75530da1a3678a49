"""KPA: the numbers in Knative's documentation and the cases that its source explains."""

import pytest

from benchmarks.autoscaling.policies.kpa import Concurrency, Kpa, KpaConfig, KpaScaler
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample


def steady(value: float) -> Concurrency:
    return Concurrency(stable=value, panic=value)


def test_a_target_of_ten_at_seventy_percent_keeps_seven_a_pod() -> None:
    """https://knative.dev/docs/serving/autoscaling/concurrency/: 10 · 70 % = 7, so 100 requests want 15 pods."""
    config = KpaConfig(target=10.0)
    assert config.target_per_pod == pytest.approx(7.0)
    assert Kpa(config, ready=10, now=0.0).scale(steady(100.0), ready=10, now=0.0) == 15


def test_rounding_never_prevents_growth() -> None:
    """The case in ``autoscaler.go``: a rate of 1.1 over two pods still lets three requests have three pods."""
    config = KpaConfig(target=1.0, target_utilization=1.0, max_scale_up_rate=1.1)
    assert Kpa(config, ready=1, now=0.0).scale(steady(3.0), ready=2, now=0.0) == 3


def test_pods_at_most_halve_at_once() -> None:
    kpa = Kpa(KpaConfig(target=10.0, target_utilization=1.0), ready=1, now=0.0)
    assert kpa.scale(steady(10.0), ready=8, now=0.0) == 4


def test_panic_starts_at_twice_the_capacity_and_keeps_its_maximum() -> None:
    """https://knative.dev/docs/serving/autoscaling/kpa-specific/: threshold 200 %, window 60 s, no scale-down in it."""
    kpa = Kpa(KpaConfig(target=10.0, target_utilization=1.0), ready=1, now=0.0)
    assert kpa.scale(Concurrency(stable=5.0, panic=19.0), ready=1, now=0.0) == 2, "ceil(19 / 10) / 1 is 200 %"
    assert kpa.is_panicking
    assert kpa.scale(Concurrency(stable=15.0, panic=60.0), ready=2, now=10.0) == 6
    assert kpa.scale(steady(5.0), ready=6, now=40.0) == 6, "nothing goes while panicking"
    assert kpa.scale(steady(5.0), ready=6, now=70.0) == 6, "60 s after the last cause it still panics"
    assert kpa.scale(steady(5.0), ready=6, now=70.5) == 3
    assert not kpa.is_panicking


def test_below_the_threshold_only_the_stable_window_counts() -> None:
    kpa = Kpa(KpaConfig(target=10.0, target_utilization=1.0), ready=4, now=0.0)
    kpa.scale(steady(40.0), ready=4, now=0.0)
    assert kpa.scale(Concurrency(stable=41.0, panic=70.0), ready=4, now=100.0) == 5
    assert not kpa.is_panicking


def test_scale_down_delay_keeps_the_most_of_its_window() -> None:
    config = KpaConfig(target=10.0, target_utilization=1.0, scale_down_delay_seconds=300.0)
    kpa = Kpa(config, ready=1, now=0.0)
    assert kpa.scale(steady(10.0), ready=1, now=0.0) == 1
    assert kpa.scale(steady(20.0), ready=2, now=100.0) == 2
    assert [kpa.scale(steady(10.0), ready=2, now=now) for now in (200.0, 399.0, 401.0)] == [2, 2, 1]


def observed(now: float, running: dict[str, float | None]) -> Observation:
    def reading(value: float | None) -> ReplicaSample | None:
        if value is None:
            return None
        return ReplicaSample(
            time=now, running=value, waiting=0, queued_prompt_tokens=0, kv_tokens_used=0, kv_tokens_capacity=1
        )

    replicas = tuple(
        ReplicaObservation(name=name, phase=ReplicaPhase.READY, sample=reading(value))
        for name, value in running.items()
    )
    return Observation(replicas=replicas, target=len(running))


def test_pods_without_a_scrape_count_as_the_mean_of_others() -> None:
    scaler = KpaScaler(KpaConfig(target=10.0, target_utilization=1.0), minimum=1, maximum=10)
    assert scaler.decide(observed(0.0, {"a": 30.0, "b": None}), 0.0).replicas == 6


def test_kpa_keeps_replicas_without_data_in_the_stable_window() -> None:
    scaler = KpaScaler(KpaConfig(target=10.0, target_utilization=1.0), minimum=1, maximum=10)
    assert scaler.decide(observed(0.0, {"a": 30.0}), 0.0).replicas == 3
    dark: dict[str, float | None] = dict.fromkeys("abc")
    assert scaler.decide(observed(30.0, dark), 30.0).replicas == 3
    assert scaler.decide(observed(300.0, dark), 300.0).replicas == 3
