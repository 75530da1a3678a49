"""Groups of pods on a real API server with the controller of LeaderWorkerSets and simulated nodes.

The kind belongs to the whole server: it is missing at first, and is removed at the end. The tests run in this order.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.control_plane import ControlPlane
from quire_cluster.fake_nodes import FakeNodes
from quire_cluster.group_controller import GroupController

SHAPE = {"tensor": 2, "nodes": 2}
DISCOVERY = ("--discovery", "1s", "--network-policy-from", '[{"podSelector": {}}]')
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@pytest.fixture(scope="module")
def groups(crd_installed: ControlPlane) -> Iterator[Namespace]:
    """Yield a namespace for this module."""
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": "groups"}}).ok
    yield Namespace(crd_installed, "groups")
    crd_installed.client().delete("/api/v1/namespaces/groups")


@pytest.fixture(scope="module")
def operator(operators: Operators, groups: Namespace) -> Iterator[OperatorProcess]:
    process = operators.start(*groups.flags(), *DISCOVERY, identity="groups-operator")
    groups.wait_holder(process.identity)
    yield process
    process.kill()


def pods(space: Namespace) -> list[dict[str, Any]]:
    return [pod for pod in space.items("pods") if "deletionTimestamp" not in pod["metadata"]]


def indexes(space: Namespace) -> list[str]:
    return sorted(pod["metadata"]["labels"][INDEX] for pod in pods(space))


def selected(space: Namespace, service: str) -> set[str]:
    """Return the pods that a Service selects; simulated pods have addresses on loopback, and so no endpoints."""
    selector = (space.get("services", service) or {})["spec"]["selector"].items()
    return {pod["metadata"]["name"] for pod in pods(space) if selector <= pod["metadata"]["labels"].items()}


def set_of(space: Namespace) -> dict[str, Any]:
    return space.get("leaderworkersets", "chat-group") or {}


def wait_serving(space: Namespace, replicas: int) -> None:
    def serves() -> bool:
        resource = space.get("llmdeployments", "chat") or {}
        status = resource.get("status", {})
        is_current = status.get("observedGeneration") == resource["metadata"]["generation"]
        ready = space.condition("chat", "Ready")
        return is_current and ready.get("reason") == "Serving" and status["replicas"] == replicas

    until(serves, why=lambda: (space.condition("chat", "Ready"), set_of(space).get("status")))


def faults(process: OperatorProcess) -> list[str]:
    ours = [line for line in process.lines() if line.get("logger", "").startswith("quire_operator")]
    return [str(line["message"]) for line in ours if line["level"] in ("error", "critical")]


def test_groups_are_created_when_their_kind_appears(
    groups: Namespace, operator: OperatorProcess, fake_nodes: FakeNodes, group_controller: GroupController
) -> None:
    groups.apply(parallelism=SHAPE)
    blocked = groups.wait_reason("chat", "Ready", "LeaderWorkerSetMissing")
    assert "kubectl apply --server-side" in blocked["message"]
    assert groups.names("pods") == [] and groups.get("services", "chat") is None

    group_controller.install()
    wait_serving(groups, 1)

    leader, worker = sorted(pods(groups), key=lambda pod: pod["metadata"]["labels"][INDEX])
    assert [leader["metadata"]["name"], worker["metadata"]["name"]] == ["chat-group-0", "chat-group-0-1"]
    env = {entry["name"]: entry for entry in worker["spec"]["containers"][0]["env"]}
    assert env["LWS_LEADER_ADDRESS"]["value"] == "chat-group-0.chat-group.groups"
    assert env["LWS_WORKER_INDEX"]["value"] == "1"
    secret = env["QUIRE_GROUP_SECRET"]["valueFrom"]["secretKeyRef"]["name"]
    found = groups.get("secrets", secret)
    assert found is not None and found["immutable"] is True
    assert selected(groups, "chat") == {"chat-group-0"}, "leaders only"


def test_fields_added_by_lws_are_kept(groups: Namespace, operator: OperatorProcess) -> None:
    """Its webhook and controller set fields; nothing is written for them in several discoveries."""
    audit = groups.server.audit
    start = audit.position()

    def discovered() -> bool:
        lists = [r for r in audit.requests(start, user_agent=operator.identity) if r.resource == "leaderworkersets"]
        return len(lists) >= 3

    until(discovered)
    written = audit.mutating_requests(start, user_agent=operator.identity)
    assert [str(request) for request in written if request.resource != "leases"] == []
    assert groups.condition("chat", "ForeignFields")["reason"] == "NoneFound"


def test_scaling_counts_groups(groups: Namespace, operator: OperatorProcess) -> None:
    groups.apply(parallelism=SHAPE, replicas=2)
    wait_serving(groups, 2)
    assert indexes(groups) == ["0", "0", "1", "1"]

    def allowed() -> tuple[int, int]:
        status = (groups.get("poddisruptionbudgets", "chat") or {})["status"]
        return status["expectedPods"], status["disruptionsAllowed"]

    until(lambda: allowed() == (4, 1), why=allowed)

    groups.apply(parallelism=SHAPE, replicas=0)
    groups.wait_reason("chat", "Ready", "ScaledToZero")
    until(lambda: not pods(groups))
    groups.apply(parallelism=SHAPE, replicas=1)
    wait_serving(groups, 1)


def test_rollout_replaces_groups_and_renews_the_secret(groups: Namespace, operator: OperatorProcess) -> None:
    before = {pod["metadata"]["uid"] for pod in pods(groups)}
    secrets = set(groups.names("secrets"))
    groups.apply(parallelism=SHAPE, replicas=1, engine={"maxSequences": 7})
    until(lambda: before.isdisjoint(pod["metadata"]["uid"] for pod in pods(groups)) and len(pods(groups)) == 2)
    wait_serving(groups, 1)
    assert len(set(groups.names("secrets")) - secrets) == 1
    assert all("7" in pod["spec"]["containers"][0]["args"] for pod in pods(groups))


def test_changes_by_other_clients_are_reverted(groups: Namespace, operator: OperatorProcess) -> None:
    groups.patch("leaderworkersets", "chat-group", {"spec": {"replicas": 3}}, manager="meddler")
    groups.touch("chat", "1")
    until(lambda: set_of(groups)["spec"]["replicas"] == 1)
    host = {"spec": {"leaderWorkerTemplate": {"workerTemplate": {"spec": {"hostPID": True}}}}}
    groups.patch("leaderworkersets", "chat-group", host, manager="meddler")
    groups.touch("chat", "2")
    until(lambda: "hostPID" not in set_of(groups)["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"])
    wait_serving(groups, 1)


def test_restarted_worker_recreates_its_group_and_its_cause_is_kept(
    groups: Namespace, operator: OperatorProcess
) -> None:
    ended = {"terminated": {"exitCode": 2, "reason": "Error", "message": "quire-engine cannot start: no such model"}}
    container = {"name": "engine", "ready": False, "restartCount": 1, "image": "x", "imageID": "", "lastState": ended}
    container["state"] = {"waiting": {"reason": "CrashLoopBackOff"}}
    unready = [{"type": "Ready", "status": "False"}]
    # The group that the test before has made the controller replace may still be ending.
    before: set[str] = set()

    def has_restarted() -> bool:
        before.update(pod["metadata"]["uid"] for pod in pods(groups))
        return groups.write_pod_status("chat-group-0-1", {"containerStatuses": [container], "conditions": unready})

    until(has_restarted)
    until(lambda: before.isdisjoint(pod["metadata"]["uid"] for pod in pods(groups)) and len(pods(groups)) == 2)
    wait_serving(groups, 1)
    reasons = {event["reason"] for event in groups.items("events") if event["involvedObject"]["name"] == "chat"}
    assert "EngineRefused" in reasons


def test_deletion_removes_all_children(groups: Namespace, operator: OperatorProcess) -> None:
    groups.delete("llmdeployments", "chat")
    kinds = ("leaderworkersets", "pods", "secrets", "networkpolicies", "services")
    until(lambda: not [name for kind in kinds for name in groups.names(kind)], why=lambda: groups.names("pods"))
    assert faults(operator) == []


def test_controller_that_does_not_run_is_reported(
    groups: Namespace, operator: OperatorProcess, group_controller: GroupController
) -> None:
    """The webhooks of an absent controller reject every LeaderWorkerSet."""
    group_controller.process.kill()
    groups.apply(parallelism=SHAPE)
    failed = groups.wait_reason("chat", "Ready", "LeaderWorkerSetFailed")
    assert "lws-system" in failed["message"]
