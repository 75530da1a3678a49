"""The autoscalers of others give the numbers of their own documentation's examples."""

from collections.abc import Mapping

import pytest

from benchmarks.autoscaling.policies import (
    SCALE_DOWN,
    SCALE_UP,
    ComputeBound,
    Concurrency,
    Controller,
    EngineLimits,
    HpaConfig,
    HpaScaler,
    KedaConfig,
    KedaScaler,
    Kpa,
    KpaConfig,
    KpaScaler,
    LlmdConfig,
    Query,
    ReactiveBound,
    Replica,
    Rules,
    Step,
    Tolerances,
    Trigger,
    Unit,
    needed_so_far,
    replicas_for_average_value,
    replicas_for_pods_metric,
    token_balance,
)
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample


def observed(time: float, waiting: Mapping[str, float], *, prompt_tokens: float = 0.0) -> Observation:
    """Return ready replicas with so many waiting requests, sampled at a time."""
    replicas = tuple(
        ReplicaObservation(
            name=name,
            phase=ReplicaPhase.READY,
            sample=ReplicaSample(
                time=time,
                waiting=value,
                running=0,
                queued_prompt_tokens=0,
                kv_tokens_used=0,
                kv_tokens_capacity=1,
                prompt_tokens=prompt_tokens,
            ),
        )
        for name, value in waiting.items()
    )
    return Observation(replicas=replicas, target=len(waiting))


# --- HPA: https://kubernetes.io/docs/concepts/workloads/autoscaling/horizontal-pod-autoscale/ ---


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


def test_hpa_keeps_replicas_during_a_scrape_outage() -> None:
    scaler = HpaScaler(HpaConfig(requests_per_pod=10), minimum=1, maximum=10)
    old = observed(0.0, {"a": 50.0})
    assert scaler.decide(old, 60.0).replicas == 1, "a series that ended is no metric"
    assert scaler.decide(old, 5.0).replicas == 5


# --- KEDA: https://keda.sh/docs/2.17/reference/scaledobject-spec/ and …/scalers/prometheus/ ---


def test_the_total_over_the_threshold_is_the_number() -> None:
    """``threshold: '100'`` on a sum, as in the trigger's example: 450 requests want 5 replicas."""
    scaler = KedaScaler(KedaConfig(query=Query.WAITING, threshold=100.0), minimum=1, maximum=10)
    assert scaler.decide(observed(0.0, {"a": 250.0, "b": 200.0}), 0.0).replicas == 5


def test_empty_result_counts_as_zero_like_a_dead_scrape() -> None:
    scaler = KedaScaler(KedaConfig(query=Query.WAITING, threshold=10.0), minimum=1, maximum=10)
    busy = {"a": 30.0, "b": 30.0, "c": 30.0}
    assert scaler.decide(observed(0.0, busy), 0.0).replicas == 7
    for now in range(30, 300, 15):
        assert scaler.decide(observed(0.0, busy), now).replicas == 3, "the HPA's window still holds"
    assert scaler.decide(observed(0.0, busy), 310.0).replicas == 1


def test_three_failures_replace_the_metric_by_the_fallback() -> None:
    """The page's example: ``failureThreshold: 3``, ``replicas: 6``."""
    config = KedaConfig(threshold=5.0, ignore_null_values=False, fallback_replicas=6)
    trigger = Trigger(config)
    assert [trigger.metric(None) for _ in range(5)] == [None, None, None, 30.0, 30.0]
    assert trigger.metric(7.0) == 7.0
    assert trigger.metric(None) is None, "counted again after a success"


def test_rate_is_computed_per_series_over_two_minutes() -> None:
    scaler = KedaScaler(KedaConfig(query=Query.TOKEN_RATE, threshold=100.0), minimum=1, maximum=10)
    scaler.decide(observed(0.0, {"a": 0.0}, prompt_tokens=1000.0), 0.0)
    assert scaler.decide(observed(15.0, {"a": 0.0}, prompt_tokens=5500.0), 15.0).replicas == 3


# --- KPA ---


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


def test_scale_down_delay_keeps_the_most_of_its_window() -> None:
    config = KpaConfig(target=10.0, target_utilization=1.0, scale_down_delay_seconds=300.0)
    kpa = Kpa(config, ready=1, now=0.0)
    assert kpa.scale(steady(10.0), ready=1, now=0.0) == 1
    assert kpa.scale(steady(20.0), ready=2, now=100.0) == 2
    assert [kpa.scale(steady(10.0), ready=2, now=now) for now in (200.0, 399.0, 401.0)] == [2, 2, 1]


def test_kpa_keeps_replicas_without_data_in_the_stable_window() -> None:
    scaler = KpaScaler(KpaConfig(target=10.0, target_utilization=1.0), minimum=1, maximum=10)
    assert scaler.decide(observed(0.0, {"a": 30.0}), 0.0).replicas == 3
    assert scaler.decide(observed(0.0, dict.fromkeys("abc", 1.0)), 300.0).replicas == 3


# --- llm-d ---


def full(tokens_in_use: float, queue: float) -> Replica:
    return Replica(
        kv_usage=tokens_in_use / 100_000, queue_length=queue, kv_tokens=100_000, mean_input=900, mean_output=100
    )


def test_required_and_spare_capacity_follow_the_formula() -> None:
    """RC = demand / 0.85 − (ready + pending) · capacity; SC = ready · capacity − demand / 0.70."""
    config = LlmdConfig()
    bound = ComputeBound(EngineLimits(max_batched_tokens=10**9, max_sequences=10**9))
    balance = token_balance([full(60_000, 0), full(60_000, 4)], config, bound, pending=1)
    assert balance.per_replica == 80_000, "memory-bound: kvCacheThreshold of the cache"
    assert balance.demand == 124_000, "a waiting request is charged its prompt and its answer"
    assert balance.required(config) == 0.0, "the pending replica is supply"
    assert balance.target(config) == 3
    lone = token_balance([full(60_000, 0), full(60_000, 40)], config, bound, pending=0)
    assert lone.per_replica == 70_000, "the median of 80,000 and of the 60,000 held behind a full queue"
    assert lone.required(config) == pytest.approx(160_000 / 0.85 - 140_000)
    assert lone.target(config) == 3
    unlimited = ComputeBound(EngineLimits(max_batched_tokens=10**9, max_sequences=10**9))
    idle = token_balance([full(10_000, 0)] * 4, config, unlimited, pending=0)
    assert idle.spare(config) == pytest.approx(320_000 - 40_000 / 0.70)
    assert idle.target(config) == 1


def test_capacity_follows_full_queues_then_means_then_limits() -> None:
    config = LlmdConfig()
    bound = ComputeBound(EngineLimits(max_batched_tokens=8192, max_sequences=256))
    quiet = full(5_000, 0)
    derived = 8192 * 100 / 1000 * (900 + 50)
    assert bound.tokens(quiet, config, memory_bound=80_000) == pytest.approx(min(derived, 256 * 950))
    assert bound.tokens(full(20_000, 5), config, memory_bound=80_000) == pytest.approx(20_000)
    assert bound.tokens(full(30_000, 9), config, memory_bound=80_000) == pytest.approx(30_000)
    assert bound.tokens(quiet, config, memory_bound=80_000) == pytest.approx(25_000)


# --- references ---


def test_need_so_far_is_the_most_that_any_stretch_kept_busy() -> None:
    assert needed_so_far([4.0, 0.0, 0.0]) == pytest.approx([4 / 3] * 3)
    assert needed_so_far([1.0] * 8)[-1] == pytest.approx(8 / 10)
    assert needed_so_far([0.0, 6.0, 6.0, 0.0]) == pytest.approx([0.0, 2.0, 3.0, 3.0])


def test_bound_never_lowers() -> None:
    bound = ReactiveBound([Request(0.0, 1, 1), Request(9.0, 1, 1)], [30.0, 0.0], static=16, maximum=48)
    asked = [bound.decide(Observation(replicas=(), target=now), now).replicas for now in (1, 2, 9)]
    assert asked == [21, 21, 21]
