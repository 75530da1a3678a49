"""The conditions of a rollout: its progress, why it stopped, and how it can continue."""

from dataclasses import replace
from typing import Any

import pytest
import status_views
from specs import valid_spec
from status_views import deployment

from quire_operator.api import Spec
from quire_operator.deployment.conditions import standing
from quire_operator.deployment.status import events
from quire_operator.kube.objects import Condition, Pod

NO_GPU = (
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/2 nodes are "
    "available: 2 No preemption victims found for incoming pod."
)
OVERDUE = Condition(
    is_true=False, reason="ProgressDeadlineExceeded", message='ReplicaSet "x" has timed out progressing.'
)


def spec(**rollout: Any) -> Spec:
    return valid_spec(replicas=2, rollout={"progressDeadline": "90s"} | rollout)


def pod(name: str, revision: str, *, created: str, ready: bool = True, unschedulable: str = "") -> Pod:
    made = status_views.pod(ready=ready)
    return replace(made, name=name, revision=revision, created=created, unschedulable=unschedulable)


OLD = (pod("a", "old", created="2026-01-01T00:00:00Z"), pod("b", "old", created="2026-01-01T00:00:00Z"))
PENDING = pod("c", "new", created="2026-01-02T00:00:00Z", ready=False, unschedulable=NO_GPU)
STUCK = deployment(replicas=3, updated=1)


def said(kind: str, **changes: Any) -> tuple[str, str]:
    fields: dict[str, Any] = {"spec": spec(), "deployment": STUCK, "pods": (*OLD, PENDING)}
    state = status_views.shown(**(fields | changes))[kind]
    return f"{state.is_true} {state.reason}", state.message


WHERE = "1 of 2 replicas have the newest revision, 0 of them ready; 2 of the previous revision remain, 2 ready"


def test_rollout_message_counts_replicas_by_revision() -> None:
    new = replace(PENDING, ready=True)
    halfway = replace(STUCK, replicas=2, updated=1, ready=2)
    assert standing(halfway, (OLD[0], new)) == (
        "1 of 2 replicas have the newest revision, 1 of them ready; 1 of the previous revision remain, 1 ready"
    )
    assert standing(replace(STUCK, updated=3, replicas=3), OLD) == "2 of 2 replicas are ready"
    assert said("Ready", pods=(*OLD, replace(PENDING, unschedulable="")))[1] == WHERE


def test_missing_spare_gpu_names_a_rollout_without_surge() -> None:
    reason, message = said("Ready")
    assert reason == "False InsufficientGPU"
    assert message.startswith(f"{WHERE}; no node can run pod c: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu")
    assert message.endswith("set maxSurge: 0 and maxUnavailable: 1 to replace replicas one by one")


@pytest.mark.parametrize(
    "changes",
    [
        {"spec": spec(maxSurge=0, maxUnavailable=1), "deployment": replace(STUCK, replicas=2, ready=1)},
        {"deployment": replace(STUCK, replicas=2, updated=2)},
    ],
    ids=["it replaces one by one already", "nothing is being replaced"],
)
def test_rollout_advice_is_given_only_if_it_helps(changes: dict[str, Any]) -> None:
    assert "one by one" not in said("Degraded", **changes)[1]


@pytest.mark.parametrize(
    ("cache", "of_class"),
    [
        ({"size": "1Gi", "storageClassName": "fast"}, "storage class fast"),
        ({"size": "1Gi"}, "the default storage class"),
    ],
)
def test_claim_without_a_volume_is_named_with_its_class(cache: dict[str, Any], of_class: str) -> None:
    """The scheduler names neither."""
    waiting = valid_spec(replicas=1, model={"source": "hf://org/m", "cache": cache})
    unbound = replace(PENDING, unschedulable="pod has unbound immediate PersistentVolumeClaims. not found")
    named = f"the claim chat-models of spec.model.cache has no volume of {of_class} yet"
    assert named in said("Degraded", spec=waiting, pods=(unbound,))[1]
    assert named not in said("Degraded", spec=waiting, pods=(PENDING,))[1]
    existing = valid_spec(replicas=1, model={"source": "hf://org/m", "cache": {"claimName": "mine"}})
    assert "spec.model.cache" not in said("Degraded", spec=existing, pods=(unbound,))[1]


def test_deadline_reports_the_stop_its_reason_and_the_remedy() -> None:
    late = replace(STUCK, progressing=OVERDUE)
    reason, message = said("Progressing", deployment=late)
    assert reason == "False ProgressDeadlineExceeded"
    assert message.startswith(
        "the rollout has stopped: no further replica became ready within 1m30s (spec.rollout.progressDeadline); "
        + WHERE
    )
    assert "2 Insufficient nvidia.com/gpu" in message
    assert message.endswith("replicas of the previous revision continue to serve; correct the spec or revert it")
    assert said("Degraded", deployment=late)[0] == "True InsufficientGPU", "the cause, not that it took long"
    assert said("Degraded", deployment=late, pods=OLD)[0] == "True ProgressDeadlineExceeded", "no cause is known"


def test_replicas_that_never_started_are_no_stopped_rollout() -> None:
    first = replace(STUCK, replicas=2, updated=2, ready=0, available=0, progressing=OVERDUE)
    _, message = said("Progressing", deployment=first, pods=())
    assert message.startswith("no further replica became ready within 1m30s")
    assert "version before" not in message


def test_deadline_event_is_recorded_once() -> None:
    def at(reason: str) -> dict[str, object]:
        return {"conditions": [{"type": "Progressing", "status": "False", "reason": reason, "message": "m"}]}

    (event,) = events(at("InsufficientGPU"), at("ProgressDeadlineExceeded"))
    assert (event.warning, event.reason) == (True, "ProgressDeadlineExceeded")
    assert events(at("ProgressDeadlineExceeded"), at("ProgressDeadlineExceeded")) == ()
