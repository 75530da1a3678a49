"""KEDA: the behaviour in https://keda.sh/docs/2.17/reference/scaledobject-spec/ and …/scalers/prometheus/."""

from benchmarks.autoscaling.policies.keda import KedaConfig, KedaScaler, Query, Trigger
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample


def observed(
    time: float, waiting: dict[str, float], *, prompt_tokens: float = 0.0, phase: ReplicaPhase = ReplicaPhase.READY
) -> Observation:
    replicas = tuple(
        ReplicaObservation(
            name=name,
            phase=phase,
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


def test_empty_result_is_an_error_unless_nulls_are_ignored() -> None:
    trigger = Trigger(KedaConfig(ignore_null_values=False))
    assert [trigger.metric(None) for _ in range(9)] == [None] * 9


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


def test_pods_that_end_still_count_in_the_query() -> None:
    scaler = KedaScaler(KedaConfig(query=Query.WAITING, threshold=10.0), minimum=1, maximum=10)
    draining = observed(0.0, {"old": 30.0}, phase=ReplicaPhase.DRAINING)
    there = observed(0.0, {"a": 10.0})
    both = Observation(replicas=(*draining.replicas, *there.replicas), target=1)
    assert scaler.decide(both, 0.0).replicas == 4
