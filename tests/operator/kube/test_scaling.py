"""Who sets the number of replicas: the spec, `kubectl scale`, the autoscaler; and the ways between them."""

import pytest
from kube_support.operators import Namespace, OperatorProcess, until

from quire_cluster.audit import Position
from quire_cluster.errors import KubectlFailed

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 8}


@pytest.fixture
def shared(shared_space: Namespace, operator: OperatorProcess) -> Namespace:
    return shared_space


def replicas_applied(space: Namespace, name: str, since: Position) -> list[int]:
    """What the operator asked for, each time it wrote the Deployment."""
    written = space.server.audit.mutating_requests(since, user_agent="shared-operator")
    return [r.body["spec"]["replicas"] for r in written if (r.resource, r.name) == ("deployments", name)]


def wait_replicas(space: Namespace, name: str, wanted: int) -> None:
    def asked() -> int:
        return int((space.get("deployments", name) or {"spec": {"replicas": -1}})["spec"]["replicas"])

    until(lambda: asked() == wanted, why=asked)
    space.wait_settled(name)


def autoscaling_status(space: Namespace, name: str) -> dict[str, object] | None:
    resource = space.get("llmdeployments", name)
    assert resource is not None
    section: dict[str, object] | None = resource["status"].get("autoscaling")
    return section


def test_kubectl_scale_sets_the_spec_and_the_deployment_follows(shared: Namespace) -> None:
    shared.apply("scaled", replicas=1)
    shared.wait_settled("scaled")
    shared.server.kubectl("scale", "-n", shared.name, "llmd/scaled", "--replicas=3")
    wait_replicas(shared, "scaled", 3)
    resource = shared.get("llmdeployments", "scaled")
    assert resource is not None
    assert (resource["status"]["replicas"], resource["status"]["desiredReplicas"]) == (3, 3)
    assert resource["status"]["selector"] == "app.kubernetes.io/component=engine,quire.dev/llmdeployment=scaled"


def test_from_static_to_autoscaling_and_back_changes_nothing_by_itself(shared: Namespace) -> None:
    shared.apply("switched", replicas=6)
    shared.wait_settled("switched")
    start = shared.server.audit.position()

    shared.apply("switched", replicas=6, autoscaling=AUTOSCALING)
    shared.wait_reason("switched", "Autoscaling", "Enforcing")
    shared.wait_settled("switched")
    assert autoscaling_status(shared, "switched") == {"desiredReplicas": 6}, "persisted before anything is acted upon"

    with pytest.raises(KubectlFailed, match="the autoscaler owns the number of replicas"):
        shared.server.kubectl("scale", "-n", shared.name, "llmd/switched", "--replicas=2")

    shared.apply("switched", replicas=6, autoscaling=AUTOSCALING | {"minReplicas": 7})
    wait_replicas(shared, "switched", 7)
    shared.apply("switched", replicas=6, autoscaling={"minReplicas": 1, "maxReplicas": 5})
    wait_replicas(shared, "switched", 5)

    shared.apply("switched", replicas=6)
    wait_replicas(shared, "switched", 6)
    shared.wait_reason("switched", "Autoscaling", "NotConfigured")
    assert autoscaling_status(shared, "switched") is None, "an old decision must not come back later"
    assert set(replicas_applied(shared, "switched", start)) <= {5, 6, 7}, "never below on the way"


def test_recommending_changes_nothing(shared: Namespace) -> None:
    shared.apply("advised", replicas=2, autoscaling=AUTOSCALING | {"mode": "Recommend"})
    shared.wait_reason("advised", "Autoscaling", "Recommending")
    wait_replicas(shared, "advised", 2)


def test_whoever_else_scales_the_deployment_is_named(shared: Namespace) -> None:
    shared.apply("contested", replicas=2, autoscaling=AUTOSCALING)
    shared.wait_settled("contested")
    for _ in range(2):  # once is taken for a slip
        shared.server.kubectl("scale", "-n", shared.name, "deployment/contested", "--replicas=5")
        wait_replicas(shared, "contested", 2)
    contested = shared.wait_reason("contested", "Autoscaling", "ReplicasContested")
    assert contested["message"].startswith("kubectl also sets the replicas")
