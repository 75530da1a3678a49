"""The capacity check in a cluster: GPU nodes by their labels, a hub on loopback, the chart's own permissions."""

import json
from collections.abc import Iterator

import pytest
from fetch_support.hub_stub import HubStub, safetensors, serving
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from kube_support.rights import grant

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
"""128 KiB of cache per token: the longest sequence needs 16 GiB. Its weights are small."""
MODEL = {"source": "hf://org/long"}
GPU = {"limits": {"nvidia.com/gpu": 1}}
CHILDREN = ("deployments", "services", "serviceaccounts", "poddisruptionbudgets")
T4_MEBIBYTES = 15_360


@pytest.fixture
def hub() -> Iterator[str]:
    files = {"config.json": json.dumps(CONFIG).encode(), "model.safetensors": safetensors(5000)}
    with serving(HubStub(repository="org/long", files=files)) as url:
        yield url


@pytest.fixture
def node(space: Namespace) -> Iterator[str]:
    """Yield a node with a T4, labelled as by NVIDIA's feature discovery; there is no kubelet."""
    name = f"{space.name}-t4"
    labels = {"nvidia.com/gpu.memory": str(T4_MEBIBYTES), "nvidia.com/gpu.product": "Tesla-T4", "pool": name}
    client = space.server.client()
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
    assert client.post("/api/v1/nodes", body).ok
    yield name
    client.delete(f"/api/v1/nodes/{name}")


@pytest.fixture
def operator(operators: Operators, space: Namespace, hub: str) -> Iterator[OperatorProcess]:
    """Yield an operator of the whole cluster, which may list nodes."""
    kubeconfig = grant(space.server, space.name, everywhere=True)
    flags = ("--kubeconfig", str(kubeconfig), "--namespace", space.name, "--hub-endpoint", hub)
    process = operators.start(*flags, identity=space.name)
    space.wait_holder(space.name)
    yield process
    process.kill()


def test_too_large_spec_creates_nothing_until_it_is_corrected(
    space: Namespace, node: str, operator: OperatorProcess
) -> None:
    began = space.server.audit.position()
    template = {"spec": {"nodeSelector": {"pool": node}}}
    before = {kind: space.names(kind) for kind in CHILDREN}
    space.apply("sized", model=MODEL, resources=GPU, podTemplate=template)

    ready = space.wait_reason("sized", "Ready", "InsufficientGPUMemory")
    assert "the largest GPU of the nodes that podTemplate selects (Tesla-T4) is 15 GiB" in ready["message"]
    assert space.condition("sized", "Degraded")["message"] == ready["message"]
    assert {kind: space.names(kind) for kind in CHILDREN} == before

    space.apply("sized", model=MODEL, resources=GPU, podTemplate=template, engine={"maxModelLength": 8192})
    until(lambda: space.get("deployments", "sized"))
    space.wait_reason("sized", "Degraded", "AsExpected")
    generation = (space.get("deployments", "sized") or {})["metadata"]["generation"]

    space.apply("sized", model=MODEL, resources=GPU, podTemplate=template, engine={"maxModelLength": 100_000})
    space.wait_reason("sized", "Ready", "InsufficientGPUMemory")
    assert (space.get("deployments", "sized") or {})["metadata"]["generation"] == generation

    user = f"system:serviceaccount:{space.name}:quire-operator"
    asked = space.server.audit.requests(began, user=user)
    assert [request for request in asked if request.is_forbidden] == []  # a namespace that ends also answers 403
    assert {request.verb for request in asked if request.resource == "nodes"} == {"list"}
