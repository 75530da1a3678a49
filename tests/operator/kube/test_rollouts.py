"""Rollouts on simulated nodes: with and without a spare GPU, stuck, reverted, fixed; and their conditions.

The Deployment's controller, the scheduler and the GPU counts are real; kwok makes pods ready. Every case has its own
node, so that all run side by side.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from kube_support.operators import Namespace, Operators, until
from kube_support.replicas import IDLE, engines_at

from quire_cluster.audit import Position
from quire_cluster.control_plane import ControlPlane
from quire_cluster.fake_nodes import FakeNodes

GPU = {"resources": {"limits": {"nvidia.com/gpu": 1}}}
DEADLINE = "10s"
NAMES = ("surging", "one-by-one", "recreated", "stuck", "failing", "shrinking")
GPUS = {"surging": 3, "one-by-one": 2, "recreated": 2, "stuck": 2, "failing": 3, "shrinking": 4}
"""The GPUs of each case's node: all used by its replicas, or one spare."""
ONE_BY_ONE = {"maxSurge": 0, "maxUnavailable": 1}
AUTOSCALING = {"minReplicas": 1, "maxReplicas": 3, "scaleDown": {"window": "0s", "period": "1s"}}


def spec(name: str, *, image: str, replicas: int = 2, node: str | None = None, **fields: Any) -> dict[str, Any]:
    place = {"nodeSelector": {"kubernetes.io/hostname": node or f"gpus-of-{name}"}}
    engine = {"image": f"registry.example/engine:{image}"}
    return GPU | {"replicas": replicas, "engine": engine, "podTemplate": {"spec": place}} | fields


ROLLOUT: dict[str, dict[str, Any]] = {
    "surging": {},
    "one-by-one": ONE_BY_ONE,
    "recreated": {"strategy": "Recreate"},
    "stuck": {"progressDeadline": DEADLINE},
    "failing": {"progressDeadline": DEADLINE},
}


@pytest.fixture(scope="module")
def fleet(crd_installed: ControlPlane, operators: Operators, fake_nodes: FakeNodes) -> Iterator[Namespace]:
    """Yield a namespace in which each case runs its first version, with ready replicas."""
    space_name = f"rollouts-{uuid.uuid4().hex[:8]}"
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": space_name}}).ok
    space = Namespace(crd_installed, space_name)
    operator = operators.start(*space.flags(), identity=space_name, tick_seconds=1.0)
    for name in NAMES:
        fake_nodes.add(f"gpus-of-{name}", gpus=GPUS[name])
        replicas = 3 if name == "shrinking" else 2
        space.apply(name, **spec(name, image="1", replicas=replicas, rollout=ROLLOUT.get(name, {})))
    for name in NAMES:
        space.wait_reason(name, "Ready", "Serving")
    with ExitStack() as engines:
        for pod in (space.get("pods", pod) for pod in space.pods("shrinking")):
            assert pod is not None
            engines.enter_context(engines_at(pod["status"]["podIP"], IDLE))
        yield space
    operator.kill()
    crd_installed.client().delete(f"/api/v1/namespaces/{space_name}")


@pytest.fixture(scope="module")
def rolling(fleet: Namespace) -> Namespace:
    """Return the namespace after a second version was applied to each; that of one fits nowhere."""
    for name in NAMES:
        node = "nowhere" if name in ("failing", "shrinking") else None
        more = {"autoscaling": AUTOSCALING, "replicas": 3} if name == "shrinking" else {}
        fleet.apply(name, **(spec(name, image="2", node=node, rollout=ROLLOUT.get(name, {})) | more))
    return fleet


def images(space: Namespace, name: str, *, ready: bool = True) -> list[str]:
    """Return the versions of its replicas that are ready, or of those that are not."""
    found = []
    for pod in (space.get("pods", pod) for pod in space.pods(name)):
        conditions = {} if pod is None else {c["type"]: c["status"] for c in pod["status"].get("conditions", ())}
        if pod is not None and (conditions.get("Ready") == "True") is ready:
            found.append(pod["spec"]["containers"][0]["image"].rpartition(":")[2])
    return sorted(found)


def described(space: Namespace, name: str) -> str:
    """Return the output of kubectl describe as one line."""
    return " ".join(space.server.kubectl("describe", "llmd", name, "-n", space.name).split())


@pytest.mark.parametrize("name", ["surging", "one-by-one", "recreated"])
def test_every_replica_is_replaced_with_or_without_a_spare_gpu(rolling: Namespace, name: str) -> None:
    """Surge with a spare GPU; without one, replicas are replaced one by one or all at once."""
    until(lambda: images(rolling, name) == ["2", "2"], why=lambda: rolling.condition(name, "Ready"))
    rolling.wait_reason(name, "Ready", "Serving")
    rolling.wait_reason(name, "Progressing", "Complete")


def test_surge_without_a_spare_gpu_names_the_remedy_that_works(rolling: Namespace) -> None:
    degraded = rolling.wait_reason("stuck", "Degraded", "InsufficientGPU")
    assert "Insufficient nvidia.com/gpu" in degraded["message"]
    assert "spec.rollout.maxSurge: 1" in degraded["message"]
    assert "set maxSurge: 0 and maxUnavailable: 1 to replace replicas one by one" in degraded["message"]
    overdue = rolling.wait_reason("stuck", "Progressing", "ProgressDeadlineExceeded")
    assert "2 of the previous revision remain, 2 ready" in overdue["message"]
    assert images(rolling, "stuck") == ["1", "1"], "and serve"

    rolling.apply("stuck", **spec("stuck", image="2", rollout=ONE_BY_ONE))
    until(lambda: images(rolling, "stuck") == ["2", "2"], why=lambda: rolling.condition("stuck", "Ready"))
    rolling.wait_reason("stuck", "Degraded", "AsExpected")


def test_failed_rollout_ends_at_its_deadline_and_keeps_old_pods(rolling: Namespace) -> None:
    overdue = rolling.wait_reason("failing", "Progressing", "ProgressDeadlineExceeded")
    assert overdue["message"].startswith(
        "the rollout has stopped: no further replica became ready within 10s (spec.rollout.progressDeadline); "
        "1 of 2 replicas have the newest revision, 0 of them ready; 2 of the previous revision remain, 2 ready; "
    )
    assert "didn't match Pod's node affinity/selector" in overdue["message"], "the cause"
    assert overdue["message"].endswith("continue to serve; correct the spec or revert it")
    assert rolling.condition("failing", "Available")["status"] == "True"
    assert (images(rolling, "failing"), images(rolling, "failing", ready=False)) == (["1", "1"], ["2"])
    text = described(rolling, "failing")
    assert "the rollout has stopped" in text and re.search(r"Warning ProgressDeadlineExceeded", text)
    print(rolling.server.kubectl("describe", "llmd", "failing", "-n", rolling.name))
    print(rolling.server.kubectl("get", "llmd", "-n", rolling.name))


def test_failed_rollout_recovers_by_rollback_or_new_spec(rolling: Namespace) -> None:
    rolling.wait_reason("failing", "Progressing", "ProgressDeadlineExceeded")
    before = sorted(rolling.pods("failing"))
    rolling.apply("failing", **spec("failing", image="1", rollout=ROLLOUT["failing"]))
    rolling.wait_reason("failing", "Ready", "Serving")
    rolling.wait_reason("failing", "Progressing", "Complete")
    assert set(rolling.pods("failing")) < set(before), "going back restarts nothing that served"

    rolling.apply("failing", **spec("failing", image="3", rollout=ROLLOUT["failing"]))
    until(lambda: images(rolling, "failing") == ["3", "3"])
    rolling.wait_reason("failing", "Ready", "Serving")


def test_no_replica_is_removed_during_a_rollout(rolling: Namespace) -> None:
    """Its replicas are idle, and each second is a tick: it stays at three until the rollout is reverted."""
    rolling.wait_reason("shrinking", "Degraded", "Unschedulable")
    start = rolling.server.audit.position()
    until(lambda: leases(rolling, start) >= 4)  # one every two seconds
    deployment = rolling.get("deployments", "shrinking")
    assert deployment is not None and deployment["spec"]["replicas"] == 3
    assert images(rolling, "shrinking") == ["1", "1", "1"]

    rolling.apply("shrinking", **spec("shrinking", image="1", replicas=3, autoscaling=AUTOSCALING))
    until(lambda: len(rolling.pods("shrinking")) == 1, why=lambda: rolling.get("llmdeployments", "shrinking"))


def leases(space: Namespace, since: Position) -> int:
    asked = space.server.audit.mutating_requests(since, user_agent=space.name)
    return sum(request.resource == "leases" for request in asked)
