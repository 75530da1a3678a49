"""Wake routes on a real API server, with the chart's permissions."""

from collections.abc import Iterator

import pytest
from kube_support.gateways import WAKE_FLAGS, run_gateway, wake_slice
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.control_plane import ControlPlane

ZERO = {"minReplicas": 0, "maxReplicas": 1}


@pytest.fixture(scope="module")
def waking(crd_installed: ControlPlane, operators: Operators) -> Iterator[tuple[Namespace, OperatorProcess]]:
    """Yield a namespace with a gateway, and its operator."""
    space = Namespace(crd_installed, "waking")
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": "waking"}}).ok
    operator = operators.start(*space.flags(), *WAKE_FLAGS, identity="waking", tick_seconds=1.0)
    run_gateway(space)
    yield space, operator
    operator.kill()
    crd_installed.client().delete("/api/v1/namespaces/waking")


def test_service_routes_to_gateways_until_a_replica_serves(waking: tuple[Namespace, OperatorProcess]) -> None:
    space, operator = waking
    space.apply("sleepy", replicas=0, autoscaling=ZERO)
    found = until(lambda: wake_slice(space, "sleepy"), why=operator.last_words)
    assert [endpoint["addresses"] for endpoint in found["endpoints"]] == [["10.0.0.1"]]
    assert [(port["name"], port["port"]) for port in found["ports"]] == [("http", 8001)]
    service = until(lambda: space.get("services", "sleepy"))
    # A port of a Service leads to the ports of slices that have its name.
    assert [port["name"] for port in service["spec"]["ports"]] == ["http"]
    assert found["metadata"]["labels"]["kubernetes.io/service-name"] == service["metadata"]["name"]

    space.apply("sleepy", replicas=0, autoscaling={"minReplicas": 1, "maxReplicas": 1})
    until(lambda: wake_slice(space, "sleepy") is None, why=operator.last_words)


def test_endpoint_slice_is_managed_by_the_operator(waking: tuple[Namespace, OperatorProcess]) -> None:
    space, operator = waking
    space.apply("kept", replicas=0, autoscaling=ZERO)
    until(lambda: wake_slice(space, "kept"), why=operator.last_words)
    ours = f"{space.path('endpointslices')}?labelSelector=kubernetes.io/service-name=kept"
    # Kubernetes' controller adds its own slice, which is empty, and must not take ours away.
    until(lambda: len(space.server.client().get(ours).body["items"]) == 2)
    found = wake_slice(space, "kept")
    assert found is not None
    assert len(found["endpoints"]) == 1
    space.delete("llmdeployments", "kept")
    until(lambda: wake_slice(space, "kept") is None)


def test_a_slice_of_another_client_is_left_alone(waking: tuple[Namespace, OperatorProcess]) -> None:
    space, operator = waking
    metadata = {"name": "theirs-wake", "labels": {"kubernetes.io/service-name": "other"}}
    theirs = {"metadata": metadata, "addressType": "IPv4", "endpoints": [{"addresses": ["10.9.9.9"]}], "ports": []}
    space.create("endpointslices", theirs)
    space.apply("theirs", replicas=0, autoscaling=ZERO)
    space.wait_reason("theirs", "Ready", "ScaledToZero")
    until(lambda: operator.said("changing the wake route of its Service failed"), why=operator.last_words)
    found = wake_slice(space, "theirs")
    assert found is not None
    assert [endpoint["addresses"] for endpoint in found["endpoints"]] == [["10.9.9.9"]]
