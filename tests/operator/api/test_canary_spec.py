"""``spec.rollout.canary``: defaults, and each mistake with its path and remedy."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import parsed

from quire_operator.api import Canary, GateMetric, Invalid, OnFailure, OnInconclusive, Spec
from quire_operator.api.rollout import equal_load


def parse(rollout: Mapping[str, object], **spec: object) -> Spec | Invalid:
    return parsed(rollout=rollout, **spec)


def canary(**fields: object) -> dict[str, object]:
    return {"strategy": "Canary", "canary": fields}


def step(weight: object, duration: str = "1h") -> dict[str, Any]:
    return {"weightPercent": weight, "duration": duration}


def test_strategy_alone_has_the_defaults() -> None:
    spec = parse({"strategy": "Canary"})
    assert isinstance(spec, Spec)
    policy = spec.rollout.canary_policy
    assert policy == Canary()
    assert [each.weight_percent for each in policy.steps] == [10, 25, 50]
    assert [(gate.metric, gate.share, round(gate.factor, 2)) for gate in policy.gates] == [
        (GateMetric.TIME_TO_FIRST_TOKEN, 0.95, 1.15),
        (GateMetric.INTER_TOKEN_LATENCY, 0.95, 1.15),
        (GateMetric.ERROR_RATE, 0.95, 1.15),
    ]
    assert policy.gates[2].error_limit == 0.005
    assert (policy.min_requests, policy.on_failure) == (500, OnFailure.ROLLBACK)


def test_answers_are_compared_only_with_their_gate() -> None:
    assert (Canary().compares_answers, Canary().compared_percent) == (False, 0.0)
    for fields, percent in (({}, 10.0), ({"answerSamplePercent": "2.5"}, 2.5)):
        spec = parse(canary(gates=[{"metric": "Answers"}], **fields))
        assert isinstance(spec, Spec) and spec.rollout.canary is not None
        assert spec.rollout.canary.compared_percent == percent
        assert spec.rollout.canary.gates[0].error_limit == 0.01


def test_bound_of_requests_follows_min_requests() -> None:
    assert (Canary().most_requests, Canary(min_requests=50).most_requests) == (20_000, 2_000)
    spec = parse(canary(maxRequests=500, onInconclusive="Fail"))
    assert isinstance(spec, Spec) and spec.rollout.canary is not None
    assert (spec.rollout.canary.most_requests, spec.rollout.canary.on_inconclusive) == (500, OnInconclusive.FAIL)


def test_other_strategies_have_no_canary() -> None:
    spec = parse({"strategy": "Recreate"})
    assert isinstance(spec, Spec) and spec.rollout.canary_policy is None


def test_every_field_is_read() -> None:
    gates = [{"metric": "TimeToFirstToken", "percentile": 90, "maxIncreasePercent": 30}]
    gates += [{"metric": "ErrorRate", "maxPercent": "0.25"}]
    spec = parse(canary(steps=[step(5)], gates=gates, minRequests=60, onFailure="Pause"), replicas=2)
    assert isinstance(spec, Spec) and spec.rollout.canary is not None
    first, second = spec.rollout.canary.gates
    assert (first.share, round(first.factor, 2), second.error_limit) == (0.9, 1.3, 0.0025)
    assert (spec.rollout.canary.min_requests, spec.rollout.canary.on_failure) == (60, OnFailure.PAUSE)


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"steps": [step(20), step(20)]}, ".steps[1].weightPercent: must be above 20"),
        ({"steps": [step(50), step(20)]}, ".steps[1].weightPercent: must be above 50"),
        ({"steps": []}, ".steps: must have between 1 and 10 entries"),
        ({"steps": [step(100)]}, ".steps[0].weightPercent: must be <= 90"),
        ({"steps": [{"duration": "1h"}]}, ".steps[0].weightPercent: is required"),
        ({"steps": [step(20, "1s")]}, ".steps[0].duration: must be >= 10s"),
        ({"gates": [{"metric": "Latency"}]}, ".gates[0].metric: must be TimeToFirstToken,"),
        ({"gates": [{"metric": "TimeToFirsToken"}]}, ".gates[0].metric: must be TimeToFirstToken,"),
        ({"gates": [{"percentile": 95}]}, ".gates[0].metric: is required"),
        (
            {"gates": [{"metric": "ErrorRate", "percentile": 95}]},
            ".gates[0]: metrics ErrorRate and Answers have no percentile",
        ),
        (
            {"gates": [{"metric": "Answers", "maxIncreasePercent": 5}]},
            ".gates[0]: metrics ErrorRate and Answers have no percentile",
        ),
        ({"answerSamplePercent": 5}, ": answerSamplePercent is for a gate with metric Answers: add one"),
        ({"gates": [{"metric": "Answers"}], "answerSamplePercent": "5%"}, ".answerSamplePercent: must be a percentage"),
        ({"maxRequests": 499}, ": maxRequests must not be below minRequests"),
        ({"maxRequests": 10}, ".maxRequests: must be >= 50"),
        ({"onInconclusive": "Wait"}, ".onInconclusive: must be Estimate, Fail or Pass"),
        (
            {"gates": [{"metric": "TimeToFirstToken", "maxPercent": 1}]},
            ".gates[0]: maxPercent is for metrics ErrorRate and Answers",
        ),
        ({"gates": [{"metric": "ErrorRate", "maxPercent": "0,5"}]}, ".gates[0].maxPercent: must be a percentage"),
        ({"minRequests": 5}, ".minRequests: must be >= 50"),
        ({"onFailure": "Abort"}, ".onFailure: must be Rollback or Pause"),
    ],
)
def test_mistake_is_named_with_its_path(fields: dict[str, object], start: str) -> None:
    found = parse(canary(**fields), replicas=4)
    assert isinstance(found, Invalid)
    assert any(str(problem).startswith(f"spec.rollout.canary{start}") for problem in found.problems), str(found)


@pytest.mark.parametrize(
    ("weight", "replicas", "expected"),
    [
        (50, 1, (1, 50)),
        (10, 1, (1, 10)),  # too small a share for equal load
        (90, 1, (1, 50)),
        (25, 4, (1, 20)),
        (50, 4, (2, 33)),
        (10, 12, (1, 8)),
        (25, 10, (3, 23)),
        (90, 4, (4, 50)),
        (3, 60, (2, 3)),  # 1.6 % would be rounded to 2
        (20, 0, (0, 20)),
    ],
)
def test_replicas_and_share_of_a_step(weight: int, replicas: int, expected: tuple[int, int]) -> None:
    assert equal_load(weight, replicas) == expected


@given(st.integers(1, 90), st.integers(1, 200))
def test_no_canary_replica_has_more_load_than_a_stable_one(weight: int, replicas: int) -> None:
    count, share = equal_load(weight, replicas)
    assert 1 <= count <= replicas and 1 <= share <= weight
    assert share * replicas <= 1.1 * (100 - share) * count
