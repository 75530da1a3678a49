"""llm-d's workload variant autoscaler: the worked examples of its documentation."""

import pytest

from benchmarks.autoscaling.policies.llmd import (
    Analyzer,
    ComputeBound,
    EngineLimits,
    LlmdConfig,
    LlmdScaler,
    Replica,
    chart_rules,
    percentage_target,
    spare_capacity,
    token_balance,
)
from quire_operator.domain.autoscaling.observation import Observation, ReplicaObservation, ReplicaPhase, ReplicaSample

LIMITS = EngineLimits(max_batched_tokens=8192, max_sequences=256)


def at(kv_usage: float, queue: float = 0.0) -> Replica:
    return Replica(kv_usage=kv_usage, queue_length=queue)


def test_spare_kv_of_115_keeps_and_95_adds_a_replica() -> None:
    """docs/saturation-scaling-config.md, "Example scenario": 65 % and 72 %, then 65 % and 76 %."""
    config = LlmdConfig()
    first, second = spare_capacity([at(0.65), at(0.72)], config), spare_capacity([at(0.65), at(0.76)], config)
    assert (first.kv, second.kv) == (pytest.approx(0.115), pytest.approx(0.095))
    assert not first.is_short(config) and second.is_short(config)


def test_five_replicas_of_two_variants_are_all_unsaturated() -> None:
    """docs/saturation-analyzer.md, "Multi-Variant Analysis"."""
    replicas = [at(0.70, 2), at(0.75, 3), at(0.60, 1), at(0.65, 2), at(0.55, 1)]
    spare = spare_capacity(replicas, LlmdConfig())
    assert spare.replicas == 5
    assert not spare.down_is_safe, "3.25 / 4 of the load is 0.8125 KV a replica"


@pytest.mark.parametrize(
    ("replicas", "pending", "desired", "current", "target"),
    [
        pytest.param([at(0.78), at(0.78)], 0, None, 2, 3, id="short: one more than ready"),
        pytest.param([at(0.78), at(0.78)], 1, None, 3, 3, id="short, but one is starting: wait"),
        pytest.param([at(0.3), at(0.3)], 0, 4, 3, 4, id="an earlier decision stays until reached"),
        pytest.param([at(0.2), at(0.2), at(0.2)], 0, 3, 3, 2, id="fits without one: one fewer"),
        pytest.param([at(0.5), at(0.5)], 0, 2, 2, 2, id="would not fit: stay"),
        pytest.param([at(0.1)], 0, 1, 1, 1, id="the last one stays"),
        pytest.param([at(0.9, 9)], 0, 1, 1, 2, id="all saturated: more"),
    ],
)
def test_percentage_targets(
    replicas: list[Replica], pending: int, desired: int | None, current: int, target: int
) -> None:
    config = LlmdConfig(analyzer=Analyzer.PERCENTAGE)
    assert percentage_target(replicas, config, current=current, pending=pending, desired=desired) == target


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
    bound = ComputeBound(LIMITS)
    quiet = full(5_000, 0)
    derived = 8192 * 100 / 1000 * (900 + 50)
    assert bound.tokens(quiet, config, memory_bound=80_000) == pytest.approx(min(derived, 256 * 950))
    assert bound.tokens(full(20_000, 5), config, memory_bound=80_000) == pytest.approx(20_000)
    assert bound.tokens(full(30_000, 9), config, memory_bound=80_000) == pytest.approx(30_000)
    assert bound.tokens(quiet, config, memory_bound=80_000) == pytest.approx(25_000)


def observed(time: float, *, kv: float, waiting: float) -> Observation:
    reading = ReplicaSample(
        time=time,
        waiting=waiting,
        running=1,
        queued_prompt_tokens=0,
        kv_tokens_used=kv,
        kv_tokens_capacity=100,
        prompt_tokens=100 * time,
        generation_tokens=10 * time,
        finished_requests=time,
    )
    return Observation(replicas=(ReplicaObservation(name="a", phase=ReplicaPhase.READY, sample=reading),), target=1)


def test_hpa_reacts_one_scrape_later_and_waits_its_window() -> None:
    config = LlmdConfig(analyzer=Analyzer.PERCENTAGE, up=chart_rules(0.0), down=chart_rules(0.0))
    scaler = LlmdScaler(config, limits=LIMITS, minimum=1, maximum=10)
    asked = [scaler.decide(observed(now, kv=90, waiting=9), now).replicas for now in (0.0, 15.0, 30.0, 45.0)]
    assert asked == [1, 1, 2, 2]
    patient = LlmdScaler(LlmdConfig(analyzer=Analyzer.PERCENTAGE), limits=LIMITS, minimum=1, maximum=10)
    times = [float(now) for now in range(0, 300, 15)]
    slow = [patient.decide(observed(now, kv=90, waiting=9), now).replicas for now in times]
    assert slow[times.index(270.0)] == 2 and slow[times.index(225.0)] == 1


def test_a_peak_counts_for_a_minute() -> None:
    config = LlmdConfig(analyzer=Analyzer.PERCENTAGE, interval_seconds=15, up=chart_rules(0.0), down=chart_rules(0.0))
    scaler = LlmdScaler(config, limits=LIMITS, minimum=1, maximum=10)
    scaler.decide(observed(0.0, kv=10, waiting=0), 0.0)
    scaler.decide(observed(15.0, kv=10, waiting=9), 15.0)
    asked = [scaler.decide(observed(now, kv=10, waiting=0), now).replicas for now in (30.0, 45.0)]
    assert asked[-1] == 2
