"""The sources of the number of replicas: the spec, `kubectl scale`, the autoscaler; and changes between them."""

from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, until
from kube_support.replicas import BUSY, engines_at

from quire_cluster.audit import AuditedRequest

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 8}


@pytest.fixture
def shared(shared_space: Namespace, operator: OperatorProcess) -> Namespace:
    return shared_space


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


POD_IP = "127.0.77.1"


@pytest.fixture
def replica() -> Iterator[None]:
    """Yield an engine's metrics page with more waiting requests than it can run."""
    with engines_at(POD_IP, BUSY):
        yield


def test_kubectl_scale_sets_the_spec_and_the_deployment_follows(shared: Namespace) -> None:
    shared.apply("scaled", replicas=1)
    shared.wait_settled("scaled")
    shared.server.kubectl("scale", "-n", shared.name, "llmd/scaled", "--replicas=3")
    wait_replicas(shared, "scaled", 3)
    resource = shared.get("llmdeployments", "scaled")
    assert resource is not None
    assert (resource["status"]["replicas"], resource["status"]["desiredReplicas"]) == (3, 3)
    assert resource["status"]["selector"] == "app.kubernetes.io/component=engine,quire.dev/llmdeployment=scaled"


def test_hpa_that_scales_the_deployment_is_named(shared: Namespace) -> None:
    """An HPA whose minReplicas is not met scales without metrics; only the controller manager's name remains."""
    shared.apply("rivalled", replicas=2, autoscaling=AUTOSCALING)
    shared.wait_settled("rivalled")
    hpa = {
        "metadata": {"name": "rivalled"},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "rivalled"},
            "minReplicas": 4,
            "maxReplicas": 6,
        },
    }
    shared.create("horizontalpodautoscalers", hpa)
    contested = shared.wait_reason("rivalled", "Autoscaling", "ReplicasContested")
    assert contested["message"].startswith("A HorizontalPodAutoscaler, perhaps one that a KEDA ScaledObject made, also")
    assert "kubectl get hpa,scaledobject shows it" in contested["message"]
    shared.delete("horizontalpodautoscalers", "rivalled")


def scaled_to_three(request: AuditedRequest) -> str | None:
    if request.resource == "llmdeployments/status":
        return "persisted" if request.body["status"].get("autoscaling", {}).get("desiredReplicas") == 3 else None
    return "acted upon" if request.resource == "deployments" and request.body["spec"]["replicas"] == 3 else None


@pytest.mark.usefixtures("replica")
def test_queue_of_a_pod_scales_up_through_the_status(shared: Namespace) -> None:
    """The test serves its metrics."""
    targets = {"queueDepth": 4}
    shared.apply("busy", replicas=1, autoscaling={"minReplicas": 1, "maxReplicas": 3, "targets": targets})
    shared.wait_settled("busy")
    start = shared.server.audit.position()
    shared.run_pods("busy", address=POD_IP)

    until(lambda: autoscaling_status(shared, "busy") != {"desiredReplicas": 1, "specReplicas": 1})
    wait_replicas(shared, "busy", 3)
    section = autoscaling_status(shared, "busy")
    assert section is not None and section["desiredReplicas"] == 3
    decision: Any = section["lastDecision"]
    assert (decision["from"], decision["to"]) == (1, 3) and decision["inputs"]
    written = shared.server.audit.mutating_requests(start, user_agent="shared-operator")
    order = [what for request in written if request.name == "busy" and (what := scaled_to_three(request))]
    # A pass after another event may write the status once more before the decision is applied.
    assert order[0] == "persisted" and order.count("acted upon") == 1
    told = [event["reason"] for event in shared.items("events") if event["involvedObject"]["name"] == "busy"]
    assert "ScaledUp" in told
