"""Two LLMDeployments with one served name, in two namespaces that one gateway serves."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, Operators, until

from quire_cluster.control_plane import ControlPlane, KubectlFailed
from quire_common.served_names import NameScope
from quire_gateway.endpoints import Snapshot
from quire_gateway.endpoints.kubernetes import KubernetesDiscovery, from_kubeconfig


@pytest.fixture
def two(crd_installed: ControlPlane, operators: Operators, space: Namespace) -> Iterator[tuple[Namespace, Namespace]]:
    """Yield two namespaces under one operator."""
    created = crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": f"{space.name}-b"}})
    assert created.ok, created.body
    other = Namespace(crd_installed, f"{space.name}-b")
    operator = operators.start(*space.flags(crd_installed.admin_kubeconfig), "--watch-namespace", other.name)
    space.wait_holder(operator.identity)
    yield space, other
    operator.kill()
    crd_installed.client().delete(f"/api/v1/namespaces/{other.name}")


def wait_younger(older: Namespace, younger: Namespace, name: str = "chat") -> None:
    """Wait until a new object is younger: the API server's clock counts seconds."""
    first = (older.get("llmdeployments", name) or {})["metadata"]["creationTimestamp"]

    def made_later() -> bool:
        younger.apply("probe")
        made = (younger.get("llmdeployments", "probe") or {})["metadata"]["creationTimestamp"]
        younger.delete("llmdeployments", "probe")
        return bool(made > first)

    until(made_later)


ROLE: dict[str, Any] = {
    "metadata": {"name": "tenant"},
    "rules": [
        {"apiGroups": [""], "resources": ["services"], "verbs": ["*"]},
        {"apiGroups": ["quire.dev"], "resources": ["llmdeployments"], "verbs": ["*"]},
    ],
}
FORGED = {"quire.dev/served-name": "chat"}


class Tenant:
    """A user who may edit only Services and LLMDeployments of one namespace."""

    def __init__(self, space: Namespace) -> None:
        self._server, self.space = space.server, space
        client, rbac = self._server.client(), f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}"
        space.create("serviceaccounts", {"metadata": {"name": "tenant"}})
        binding = {
            "metadata": {"name": "tenant"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "tenant"},
            "subjects": [{"kind": "ServiceAccount", "name": "tenant", "namespace": space.name}],
        }
        for kind, body in (("roles", ROLE), ("rolebindings", binding)):
            answer = client.post(f"{rbac}/{kind}", body)
            assert answer.ok, answer.body
        self._kubeconfig: Path = self._server.service_account_kubeconfig(space.name, "tenant")
        until(lambda: self._may_begin())

    def kubectl(self, *arguments: str, stdin: str = "") -> str:
        return self._server.kubectl("-n", self.space.name, *arguments, as_user=self._kubeconfig, stdin=stdin)

    def apply(self, body: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(body))

    def _may_begin(self) -> bool:
        """Return True when the authorizer has seen the new binding in its watch."""
        try:
            self.kubectl("get", "services,llmdeployments")
        except KubectlFailed:
            return False
        return True


def replicas_of(space: Namespace, *services: str) -> None:
    """Write what the EndpointSlice controller writes for ready pods; there is no kubelet here to make them ready."""
    for service in services:
        labels = {"kubernetes.io/service-name": service, "quire.dev/llmdeployment": service}
        endpoint = {"addresses": ["10.0.0.1"], "conditions": {"ready": True}, "targetRef": {"name": f"{service}-0"}}
        body = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {"name": f"{service}-slice", "labels": labels},
            "addressType": "IPv4",
            "ports": [{"name": "http", "port": 8000}],
            "endpoints": [endpoint],
        }
        path = f"/apis/discovery.k8s.io/v1/namespaces/{space.name}/endpointslices"
        answer = space.server.client().post(path, body)
        assert answer.ok, answer.body


def routes(*spaces: Namespace) -> dict[str, set[str]]:
    """Return the replicas of each model, as a gateway that starts now finds them."""

    async def first() -> Snapshot:
        access = from_kubeconfig(spaces[0].server.admin_kubeconfig)
        published: asyncio.Queue[Snapshot] = asyncio.Queue()
        async with access.session() as session, asyncio.timeout(60):
            names = tuple(space.name for space in spaces)
            discovery = KubernetesDiscovery(access, session, namespaces=names, scope=NameScope.CLUSTER)
            task = asyncio.create_task(discovery.run(published.put_nowait))
            found = await published.get()
            task.cancel()
            await asyncio.wait([task])
        await asyncio.sleep(0.1)  # a cancelled TLS handshake closes its socket a moment later
        return found

    return {model: {endpoint.id for endpoint in found.endpoints} for model, found in asyncio.run(first()).items()}


def test_tenant_cannot_take_the_name_of_another_namespace(two: tuple[Namespace, Namespace]) -> None:
    """It cannot take it by annotations, finalizers, repeated edits or another served name, even as the oldest."""
    team_a, team_b = two
    tenant = Tenant(team_b)
    evil = {"apiVersion": "quire.dev/v1alpha1", "kind": "LLMDeployment", "metadata": {"name": "evil"}}
    tenant.apply(evil | {"spec": {"model": {"source": "file:///m"}}})
    team_b.wait_settled("evil")
    wait_younger(team_b, team_a, "evil")
    team_a.apply("chat", replicas=1)
    team_a.wait_settled("chat")
    replicas_of(team_a, "chat")
    replicas_of(team_b, "evil", "evil-headless", "extra")
    rightful = {"chat": {f"{team_a.name}/chat-0"}, "evil": {f"{team_b.name}/evil-0"}}
    assert routes(team_a, team_b) == rightful

    uid = json.loads(tenant.kubectl("get", "llmdeployment", "evil", "-o", "json"))["metadata"]["uid"]
    forged = FORGED | {"quire.dev/seniority": f"2000-01-01T00:00:00Z/{uid}"}
    pairs = [f"{name}={value}" for name, value in forged.items()]
    # a) The headless Service, on which the operator sets no annotations.
    tenant.kubectl("annotate", "service", "evil-headless", *pairs)
    assert routes(team_a, team_b) == rightful
    # b) A Service of its own that a finalizer keeps.
    owner = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "name": "evil",
        "uid": uid,
        "controller": True,
    }
    metadata = {
        "name": "extra",
        "labels": {"quire.dev/llmdeployment": "evil"},
        "annotations": forged,
        "ownerReferences": [owner],
        "finalizers": ["tenant.example/keep"],
    }
    spec = {"ports": [{"name": "http", "port": 8000}]}
    tenant.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
    assert routes(team_a, team_b) == rightful
    # c) The main Service, edited more often than the operator reverts a change without a pause.
    for number in range(6):
        tenant.kubectl("annotate", "--overwrite", "service", "evil", *pairs, f"n={number}")
    assert routes(team_a, team_b) == rightful
    # The status, which only the operator writes.
    with pytest.raises(KubectlFailed, match="orbidden"):
        claim = {"status": {"servedName": {"name": "chat", "since": "2000-01-01T00:00:00Z"}}}
        tenant.kubectl(
            "patch", "llmdeployment", "evil", "--subresource=status", "--type=merge", "-p", json.dumps(claim)
        )
    tenant.kubectl("patch", "llmdeployment", "evil", "--type=merge", "-p", json.dumps(claim))
    assert routes(team_a, team_b) == rightful
    # An edit of the served name, by an LLMDeployment that is older than its victim.
    renamed = {"spec": {"model": {"servedName": "chat"}}}
    tenant.kubectl("patch", "llmdeployment", "evil", "--type=merge", "-p", json.dumps(renamed))
    team_b.wait_reason("evil", "Ready", "ServedNameConflict")
    assert routes(team_a, team_b) == {"chat": rightful["chat"]}
    team_a.touch("chat", "again")
    assert team_a.condition("chat", "Ready")["reason"] == "Starting"
    tenant.kubectl("patch", "service", "extra", "--type=merge", "-p", '{"metadata": {"finalizers": null}}')
