"""Simulated nodes: a real scheduler places pods and they become Ready."""

import json

from quire_cluster.control_plane import ControlPlane
from quire_cluster.fake_nodes import FakeNodes
from quire_cluster.waiting import eventually


def deployment(*, replicas: int, gpus: int) -> str:
    container = {
        "name": "engine",
        "image": "registry.invalid/engine",
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
    }
    body = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "engine"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": {"app": "engine"}},
            "template": {"metadata": {"labels": {"app": "engine"}}, "spec": {"containers": [container]}},
        },
    }
    return json.dumps(body)


def test_pods_become_ready_on_nodes_with_gpus(api_server: ControlPlane, fake_nodes: FakeNodes, namespace: str) -> None:
    api_server.kubectl("apply", "-n", namespace, "-f", "-", stdin=deployment(replicas=4, gpus=4))
    ready = ("get", "deployment", "engine", "-n", namespace, "-o", "jsonpath={.status.readyReplicas}")
    assert eventually(lambda: api_server.kubectl(*ready) == "4")


def test_unschedulable_pod_has_a_reason(api_server: ControlPlane, fake_nodes: FakeNodes, namespace: str) -> None:
    api_server.kubectl("apply", "-n", namespace, "-f", "-", stdin=deployment(replicas=1, gpus=9))
    message = 'jsonpath={.items[*].status.conditions[?(@.type=="PodScheduled")].message}'
    why = ("get", "pods", "-n", namespace, "-o", message)
    assert eventually(lambda: "2 Insufficient nvidia.com/gpu" in api_server.kubectl(*why))
