"""The capacity check in a cluster: GPU nodes by their labels, a hub on loopback, the chart's own permissions."""

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fetch_support.hub_stub import HubStub, safetensors, serving
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from kube_support.rights import grant

from quire_cli.app import main

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


Start = Callable[..., OperatorProcess]


@pytest.fixture
def start(operators: Operators, space: Namespace) -> Iterator[Start]:
    """Yield a function that starts the operator of this test."""
    started: list[OperatorProcess] = []

    def leading(*flags: str) -> OperatorProcess:
        started.append(operators.start(*flags, identity=space.name))
        space.wait_holder(space.name)
        return started[-1]

    yield leading
    for process in started:
        process.kill()


@pytest.fixture
def operator(start: Start, space: Namespace, node: str, hub: str) -> OperatorProcess:
    """Return an operator of the whole cluster, which may list nodes."""
    kubeconfig = grant(space.server, space.name, everywhere=True)
    return start("--kubeconfig", str(kubeconfig), "--namespace", space.name, "--hub-endpoint", hub)


def needed_by_quire_plan(
    engine: dict[str, Any], hub: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[str]:
    """Return the memory that a replica needs and its parts, according to quire plan."""
    body = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "chat"}}
    body["spec"] = {"model": MODEL, "resources": GPU, "engine": engine}
    file = folder / "chat.yaml"
    file.write_text(json.dumps(body))
    monkeypatch.setenv("HF_ENDPOINT", hub)
    monkeypatch.setenv("QUIRE_CACHE", str(folder))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "-f", str(file), "--memory", f"{T4_MEBIBYTES}Mi"])
    printed = capsys.readouterr().out
    assert ended.value.code == 1, printed
    patterns = (r"needs ([\d.]+ \w+)", r"about ([\d.]+ \w+)", r"([\d.]+ \w+) of KV cache", r"Weights +([\d.]+ \w+)")
    return [found[1] for pattern in patterns if (found := re.search(pattern, printed))]


def test_too_large_spec_creates_nothing_until_it_is_corrected(
    space: Namespace,
    operator: OperatorProcess,
    node: str,
    hub: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    began = space.server.audit.position()
    template = {"spec": {"nodeSelector": {"pool": node}}}
    before = {kind: space.names(kind) for kind in CHILDREN}
    space.apply("sized", model=MODEL, resources=GPU, podTemplate=template)

    ready = space.wait_reason("sized", "Ready", "InsufficientGPUMemory")
    assert "the largest GPU of the nodes that podTemplate selects (Tesla-T4) is 15 GiB" in ready["message"]
    figures = needed_by_quire_plan({}, hub, tmp_path, monkeypatch, capsys)
    assert len(figures) == 4 and [figure for figure in figures if figure not in ready["message"]] == []
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
    assert [request for request in asked if request.status == 403] == []
    assert {request.verb for request in asked if request.resource == "nodes"} == {"list"}


def test_silent_hub_does_not_delay_reconciling(start: Start, space: Namespace) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start(*space.flags(), "--hub-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}")
        applied = time.monotonic()
        for name in ("one", "two"):
            space.apply(name, model={"source": f"hf://org/{name}"}, resources={"limits": {"memory": "1Gi"}})
        until(lambda: {"one", "two"} <= set(space.names("deployments")))
        assert time.monotonic() - applied < 20, "as long as a lookup may take"
        space.wait_reason("one", "Degraded", "AsExpected")


def test_small_memory_limit_is_reported_without_rights_to_nodes(start: Start, space: Namespace, hub: str) -> None:
    start(*space.flags(), "--hub-endpoint", hub)
    space.apply("chat", model=MODEL, resources={"limits": {"memory": "2Gi"}})
    ready = space.wait_reason("chat", "Ready", "InsufficientMemory")
    assert "spec.resources.limits.memory is 2 GiB" in ready["message"]
    assert space.names("deployments") == []
