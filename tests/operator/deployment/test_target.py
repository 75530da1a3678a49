"""The requested number of replicas, and the status before it."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import valid_spec
from status_views import deployment

from quire_operator.autoscaling.history import ScalingRecord
from quire_operator.deployment.plan import Target, target
from quire_operator.kube.objects import DeploymentState

AUTOSCALING = {"minReplicas": 2, "maxReplicas": 8}
SCALED = {"autoscaling": AUTOSCALING}


def running(asked: int, *, old: int = 0) -> DeploymentState:
    return deployment(asked, asked, updated=asked - old)


def record(replicas: int | None) -> ScalingRecord | None:
    return None if replicas is None else ScalingRecord(desired_replicas=replicas)


@pytest.mark.parametrize(
    ("fields", "decided", "persisted", "live", "wanted", "persist"),
    [
        # Static: only the spec.
        ({"replicas": 3}, None, None, None, 3, None),
        ({"replicas": 3}, None, None, running(7), 3, None),
        ({"replicas": 3}, 5, 6, running(7), 3, None),
        # Autoscaling: the decision, else the persisted, the running or the initial number; within bounds.
        (SCALED, None, None, None, 2, 2),
        ({"replicas": 4, "autoscaling": AUTOSCALING}, None, None, None, 4, 4),
        (SCALED, None, None, running(6), 6, 6),
        (SCALED, None, None, running(20), 8, 8),
        (SCALED, None, 5, running(3), 5, None),
        (SCALED, 4, 5, running(3), 4, None),
        (SCALED, 40, 5, running(3), 8, None),
        # What is persisted outside the bounds is replaced.
        (SCALED, 9, 9, running(9), 8, 8),
        (SCALED, None, 1, running(1), 2, 2),
        (SCALED, 9, 9, running(9, old=2), 8, 8),
        # Nothing is removed while old replicas are being replaced.
        (SCALED, 3, 3, running(6, old=2), 6, None),
        (SCALED, 7, 7, running(6, old=2), 7, None),
        (SCALED, 3, 3, running(9, old=2), 3, None),
        # Recommending changes nothing.
        ({"replicas": 1, "autoscaling": AUTOSCALING | {"mode": "Recommend"}}, None, 5, running(3), 3, None),
        ({"replicas": 3, "autoscaling": AUTOSCALING | {"mode": "Recommend"}}, None, None, None, 3, None),
    ],
)
def test_target(
    fields: dict[str, Any],
    decided: int | None,
    persisted: int | None,
    live: DeploymentState | None,
    wanted: int,
    persist: int | None,
) -> None:
    found = target(valid_spec(**fields), decided=decided, record=record(persisted), deployment=live, now=0.0)
    assert found == Target(replicas=wanted, persist=persist)


def test_a_removed_autoscaler_leaves_its_replicas() -> None:
    found = target(valid_spec(replicas=1), decided=None, record=record(8), deployment=running(8), kept=8, now=0.0)
    assert found == Target(replicas=8, persist=None)


COUNTS = st.none() | st.integers(0, 30)


@given(COUNTS, COUNTS, st.none() | st.integers(0, 30).map(running))
def test_target_is_within_bounds_after_any_decision(
    decided: int | None, persisted: int | None, live: DeploymentState | None
) -> None:
    found = target(
        valid_spec(autoscaling=AUTOSCALING), decided=decided, record=record(persisted), deployment=live, now=0.0
    )
    assert 2 <= found.replicas <= 8
