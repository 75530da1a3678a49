"""Discovery with a real API server and EndpointSlice controller; pods become ready by their status."""

import asyncio
from pathlib import Path

import pytest

from quire_cluster.crds import wait_established
from quire_gateway.endpoints.kubernetes import KubernetesDiscovery, from_kubeconfig

CRD = Path(__file__).parents[2] / "crds" / "llmdeployments.yaml"
MODEL = {
    "apiVersion": "quire.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "file:///m", "servedName": "org/Chat-8B"}},
}
STATUS = {"status": {"servedName": {"name": "org/Chat-8B", "since": "2026-01-01T00:00:00Z"}}}
SERVICE = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": "chat", "labels": {"quire.dev/llmdeployment": "chat"}},
    "spec": {"selector": {"app": "chat"}, "ports": [{"name": "http", "port": 8000}]},
}


def pod(name: str, node: str) -> dict:
    containers = [{"name": "engine", "image": "engine"}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "chat"}},
        "spec": {"nodeName": node, "containers": containers, "automountServiceAccountToken": False},
    }


@pytest.fixture
def node(api_server, namespace):
    """Create a node, because the EndpointSlice controller omits pods whose node does not exist."""
    client = api_server.client()
    assert client.post("/api/v1/nodes", {"metadata": {"name": namespace}}).ok
    yield namespace
    client.delete(f"/api/v1/nodes/{namespace}")


@pytest.fixture
def crd_installed(api_server):
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRD))
    wait_established(api_server.client(), "llmdeployments.quire.dev")


@pytest.fixture
async def snapshots(api_server, crd_installed, namespace):
    """Yield the published snapshots for the test's namespace."""
    access = from_kubeconfig(api_server.admin_kubeconfig)
    published: asyncio.Queue = asyncio.Queue()
    async with access.session() as session:
        discovery = KubernetesDiscovery(access, session, namespaces=(namespace,))
        task = asyncio.create_task(discovery.run(published.put_nowait))
        yield published
        task.cancel()
        await asyncio.wait([task])
    await cut_handshakes_closed()


async def cut_handshakes_closed() -> None:
    """Wait for a cancelled TLS handshake, which closes its socket a moment later without any signal."""
    await asyncio.sleep(0.1)


def _endpoints(snapshot: dict):
    model = snapshot.get("org/Chat-8B")
    return () if model is None else model.endpoints


async def next_with(snapshots: asyncio.Queue, ready: set[str]) -> dict:
    async with asyncio.timeout(120):
        while True:
            snapshot = await snapshots.get()
            if {e.id.partition("/")[2] for e in _endpoints(snapshot) if e.ready} == ready:
                return snapshot


async def test_deployment_and_its_pods_become_a_model_with_replicas(api_server, namespace, node, snapshots):
    client = api_server.client()
    pods = f"/api/v1/namespaces/{namespace}/pods"

    def send(method: str, path: str, body: object, content_type: str = "application/json") -> None:
        answer = client.request(method, path, body, content_type=content_type)
        assert answer.ok, answer.body

    def set_ready(name: str, ip: str, ready: bool) -> None:
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {"status": {"phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}], "conditions": conditions}}
        send("PATCH", f"{pods}/{name}/status", status, "application/merge-patch+json")

    models = f"/apis/quire.dev/v1alpha1/namespaces/{namespace}/llmdeployments"
    send("POST", models, MODEL)
    send("PATCH", f"{models}/chat/status", STATUS, "application/merge-patch+json")
    send("POST", f"/api/v1/namespaces/{namespace}/services", SERVICE)
    await next_with(snapshots, set())
    for name, ip in (("chat-0", "10.99.0.1"), ("chat-1", "10.99.0.2")):
        send("POST", pods, pod(name, node))
        set_ready(name, ip, True)
    found = await next_with(snapshots, {"chat-0", "chat-1"})
    assert {e.url for e in _endpoints(found)} == {"http://10.99.0.1:8000", "http://10.99.0.2:8000"}

    set_ready("chat-0", "10.99.0.1", False)
    await next_with(snapshots, {"chat-1"})
    set_ready("chat-0", "10.99.0.1", True)
    await next_with(snapshots, {"chat-0", "chat-1"})

    # It is deleted gracefully: it stays, terminating, until its grace period is over, and must get no requests.
    send("DELETE", f"{pods}/chat-1", {"gracePeriodSeconds": 300})
    async with asyncio.timeout(120):
        while True:
            leaving = [e for e in _endpoints(await snapshots.get()) if e.terminating]
            if leaving:
                break
    assert [(e.id, e.ready) for e in leaving] == [(f"{namespace}/chat-1", False)]

    send("DELETE", f"/api/v1/namespaces/{namespace}/services/chat", None)
    send("DELETE", f"{models}/chat", None)
    async with asyncio.timeout(120):
        while await snapshots.get() != {}:
            pass
