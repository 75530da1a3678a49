"""Groups of pods in the status: progress, deadlines, silent controllers, and causes that outlast recreated pods."""

from dataclasses import replace
from typing import Any

import pytest
from specs import valid_spec
from status_views import deployment, pod, shown

from quire_operator.deployment.groups import INSTALL, GroupFailure, is_settled, judged, kept_failure, missing_kind
from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.deployment.pod_failures import Failure, FailureReason, worst_failure
from quire_operator.kube.objects import HELD_PARTITION, ContainerState, DeploymentState, Pod
from quire_operator.kube.trimming import trim_child, trim_pod

SHAPE = {"tensor": 2, "nodes": 2}
GROUPED = valid_spec(replicas=2, parallelism=SHAPE)
CHANGED, START = "2026-01-01T00:00:00Z", 1_767_225_600.0
CAUSE = Failure(reason=FailureReason.ENGINE_REFUSED, message="container engine of pod w exited with code 2: no")


def groups(asked: int = 2, ready: int = 2, **changes: Any) -> DeploymentState:
    of_groups = {"template_digest": "digest", "nodes": 2, "changed": CHANGED, "deadline_seconds": 600}
    return deployment(asked, ready, **({"generation": 2, "observed_generation": 2} | of_groups | changes))


def leader(*, ready: bool = True, created: str = CHANGED, ready_changed: str = CHANGED) -> Pod:
    return replace(pod(ready=ready), created=created, ready_changed=ready_changed, group="0")


def worker(**changes: Any) -> Pod:
    return replace(pod(ready=False), name="chat-group-0-1", is_worker=True, group="0", **changes)


def body(**spec_changes: Any) -> dict[str, Any]:
    entry = {"manager": "quire", "operation": "Apply", "time": CHANGED, "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    return {
        "metadata": {
            "name": "chat-group",
            "generation": 3,
            "annotations": {"quire.dev/template": "0123456789abcdef", "quire.dev/progress-deadline-seconds": "900"},
            "managedFields": [entry],
        },
        "spec": {"replicas": 3, "leaderWorkerTemplate": {"size": 2}} | spec_changes,
        "status": {"observedGeneration": 2, "replicas": 3, "updatedReplicas": 1, "readyReplicas": 2},
    }


def test_state_is_read_from_a_leader_worker_set() -> None:
    state = trim_child(body(), kind="LeaderWorkerSet").deployment
    assert state is not None
    assert (state.replicas_asked, state.replicas, state.updated, state.ready, state.nodes) == (3, 3, 1, 2, 2)
    assert (state.revision, state.changed, state.deadline_seconds) == ("0123456789", CHANGED, 900)
    assert state.is_rolling and not state.is_held


@pytest.mark.parametrize(
    ("partition", "foreign", "held"), [(HELD_PARTITION, False, True), (HELD_PARTITION, True, False), (0, False, False)]
)
def test_paused_state_is_our_partition(partition: int, foreign: bool, held: bool) -> None:
    rules = {"type": "RollingUpdate", "rollingUpdateConfiguration": {"partition": partition}}
    raw = body(rolloutStrategy=rules)
    if foreign:
        theirs = {"f:rolloutStrategy": {"f:rollingUpdateConfiguration": {"f:partition": {}}}}
        entry = {"manager": "kubectl", "operation": "Update", "fieldsV1": {"f:spec": theirs}}
        ours = {"f:rolloutStrategy": {"f:rollingUpdateConfiguration": {"f:maxSurge": {}}}}
        raw["metadata"]["managedFields"][0]["fieldsV1"] = {"f:spec": ours}
        raw["metadata"]["managedFields"].append(entry)
    state = trim_child(raw, kind="LeaderWorkerSet").deployment
    assert state is not None and state.is_held is held


def test_pods_have_their_group_and_revision() -> None:
    labels = {
        "quire.dev/llmdeployment": "chat",
        "app.kubernetes.io/component": "engine-worker",
        "leaderworkerset.sigs.k8s.io/group-index": "4",
        "leaderworkerset.sigs.k8s.io/template-revision-hash": "abc",
    }
    found = trim_pod({"metadata": {"name": "chat-group-4-1", "labels": labels}})
    assert (found.is_worker, found.group, found.revision) == (True, "4", "abc")


@pytest.mark.parametrize(
    ("state", "settled"),
    [
        (groups(), True),
        (groups(ready=1), False),
        (groups(observed_generation=1), False),
        (groups(updated=1), False),
        (groups(replicas=3, updated=3), False),
        (groups(asked=0, ready=0), True),
    ],
)
def test_settled(state: DeploymentState, settled: bool) -> None:
    assert is_settled(state) is settled


ROLLING = groups(replicas=3, updated=1)
LATE = "2026-01-01T00:30:00Z"


@pytest.mark.parametrize(
    ("state", "pods", "seconds", "overdue"),
    [
        (groups(), (leader(), leader()), 10_000, False),
        (ROLLING, (leader(),), 599, False),
        (ROLLING, (leader(),), 601, True),
        (ROLLING, (leader(), leader(ready_changed=LATE)), 1800 + 599, False),
        (ROLLING, (leader(), leader(ready_changed=LATE)), 1800 + 601, True),
        # A rollout whose groups restart again and again makes no progress.
        (ROLLING, (leader(ready=False, created=LATE, ready_changed=LATE),), 1800, True),
        # Groups that were lost have as much time as new ones.
        (groups(ready=0), (leader(ready=False, ready_changed=LATE),), 1800 + 599, False),
        (groups(ready=0), (leader(ready=False, ready_changed=LATE),), 1800 + 601, True),
        (groups(ready=1), (leader(), leader(ready=False)), 10_000, False),
    ],
)
def test_deadline(state: DeploymentState, pods: tuple[Pod, ...], seconds: int, overdue: bool) -> None:
    found = judged(state, pods, now=START + seconds)
    assert found is not None
    assert (found.progressing is not None) is overdue
    progressing = shown(spec=GROUPED, deployment=found, pods=pods)["Progressing"]
    assert (progressing.reason == "ProgressDeadlineExceeded") is overdue


def test_lost_leader_counts_before_the_set_shows_it() -> None:
    found = judged(groups(), (leader(), replace(leader(), deleting=True)), now=START)
    assert found is not None and found.ready == 1


def test_deployment_is_not_judged() -> None:
    plain = replace(ROLLING, deadline_seconds=0, changed="", nodes=1)
    assert judged(plain, (), now=START + 10_000) is plain
    assert judged(None, (), now=START) is None


@pytest.mark.parametrize(("seconds", "silent"), [(59, False), (61, True)])
def test_controller_that_does_not_act_is_named(seconds: int, silent: bool) -> None:
    state = judged(groups(asked=1, ready=0, replicas=0, observed_generation=1), (), now=START + seconds)
    found = shown(spec=GROUPED, deployment=state, pods=())
    assert ("lws-system" in found["Ready"].message) is silent
    assert found["Ready"].reason == ("ReplicasRefused" if silent else "Starting")


def test_failure_of_a_worker_is_that_of_its_group() -> None:
    broken = worker(unschedulable="0/2 nodes are available")
    found = shown(spec=GROUPED, deployment=groups(ready=1), pods=(leader(),), workers=(broken,))
    assert found["Ready"].reason == "Unschedulable" and "chat-group-0-1" in found["Ready"].message


RESTARTED = ContainerState(name="engine", init=False, ready=False, restarts=1, ended_code=2, ended_message="quire: no")


def test_restart_is_seen_in_pods_that_are_deleted_for_it() -> None:
    gone = worker(deleting=True, containers=(RESTARTED,))
    found = worst_failure((gone,), groups(ready=1))
    assert found is not None and found.reason is FailureReason.ENGINE_REFUSED
    assert worst_failure((gone,), groups()) is None, "its group is ready again"
    ended = worker(deleting=True, containers=(replace(RESTARTED, restarts=0, ended_code=137),))
    assert worst_failure((ended,), groups(ready=1)) is None, "a stopped container ends with the signal's code"


KEPT = GroupFailure(template_digest="digest", failure=CAUSE)


@pytest.mark.parametrize(
    ("before", "seen", "state", "kept"),
    [
        (None, CAUSE, groups(ready=1), KEPT),
        (KEPT, None, groups(ready=1), KEPT),
        (KEPT, None, groups(ready=2), None),
        (KEPT, None, groups(ready=1, template_digest="other"), None),
        (None, Failure(reason=FailureReason.UNSCHEDULABLE, message="no"), groups(ready=1), None),
        (None, CAUSE, groups(ready=1, nodes=1), None),
        (KEPT, None, None, None),
    ],
)
def test_cause_is_kept_until_groups_are_ready(
    before: GroupFailure | None, seen: Failure | None, state: DeploymentState | None, kept: GroupFailure | None
) -> None:
    assert kept_failure(before, seen, state) == kept


def test_kept_cause_shows_in_the_conditions() -> None:
    found = shown(spec=GROUPED, deployment=groups(ready=1), kept_failure=CAUSE)
    assert found["Ready"].reason == "EngineRefused" and CAUSE.message in found["Ready"].message


def test_missing_kind_is_named_with_its_remedy() -> None:
    found = missing_kind(GROUPED, ClusterFeatures())
    assert found is not None and found.reason == "LeaderWorkerSetMissing" and INSTALL in found.message
    assert missing_kind(GROUPED, ClusterFeatures(served_kinds=frozenset({"LeaderWorkerSet"}))) is None
    assert missing_kind(valid_spec(parallelism={"tensor": 2}), ClusterFeatures()) is None


def test_autoscaling_message_names_the_removed_group() -> None:
    scaled = valid_spec(parallelism=SHAPE, autoscaling={"minReplicas": 1, "maxReplicas": 3})
    found = shown(spec=scaled, deployment=groups())
    assert "the group with the highest index" in found["Autoscaling"].message
