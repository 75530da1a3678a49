"""Operator and gateway with the permissions of the chart: no request is rejected, in either mode.

They run with the arguments of the chart's containers and as its ServiceAccounts; the audit log shows rejected requests.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chart_support.installation import Installation, get

from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.helm import Helm
from quire_cluster.waiting import eventually

CHART = Path(__file__).parents[2] / "charts" / "quire"


@pytest.fixture(params=["all namespaces", "some namespaces"])
def installation(
    request: pytest.FixtureRequest, cluster_binaries: Binaries, crd_server: ControlPlane, namespace: str, tmp_path: Path
) -> Iterator[Installation]:
    """Yield an installation in its own namespace. `namespace` contains the LLMDeployments."""
    values: dict[str, Any] = {"crds": {"create": False}}
    if request.param == "some namespaces":
        values["watchNamespaces"] = [namespace]
    home = f"{namespace}-system"
    crd_server.kubectl("create", "namespace", home)
    helm = Helm(cluster_binaries["helm"], CHART, tmp_path, kubeconfig=crd_server.admin_kubeconfig)
    with Installation(helm, crd_server, values, home, tmp_path) as installation:
        yield installation
    crd_server.client().delete(f"/api/v1/namespaces/{home}")


def apply(server: ControlPlane, namespace: str, name: str, **spec: Any) -> None:
    model = {"source": "hf://org/model", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": model} | spec,
    }
    server.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))


def test_operator_gets_no_forbidden_response(installation: Installation, namespace: str) -> None:
    """It creates all kinds of children, repairs one, scales, records events, and deletes one."""
    server = installation.server

    def names(kinds: str) -> set[str]:
        return set(server.kubectl("get", kinds, "-n", namespace, "-l", "quire.dev/llmdeployment", "-o", "name").split())

    def field(path: str) -> str:
        return server.kubectl("get", "llmd", "chat", "-n", namespace, "-o", f"jsonpath={{{path}}}")

    before = server.audit.position()
    address = installation.run("operator")
    apply(server, namespace, "chat", replicas=2)
    kinds = "deployments,services,serviceaccounts,persistentvolumeclaims,poddisruptionbudgets"
    assert eventually(lambda: len(names(kinds)) == 6), installation.log("operator")
    assert eventually(lambda: len(names("pods")) == 2)
    assert eventually(lambda: field(".status.replicas") == "2"), installation.log("operator")

    server.kubectl("scale", "deployment/chat", "--replicas=5", "-n", namespace)
    deployment = ("get", "deployment", "chat", "-n", namespace, "-o", "jsonpath={.spec.replicas}")
    assert eventually(lambda: server.kubectl(*deployment) == "2")

    apply(server, namespace, "chat", replicas=2, model={"source": "hf://org/model"})
    assert eventually(lambda: not names("persistentvolumeclaims")), installation.log("operator")
    assert eventually(lambda: field(".status.observedGeneration") == "2")
    assert server.kubectl("get", "events", "-n", namespace, "--field-selector", "involvedObject.kind=LLMDeployment")
    assert installation.probes_pass("operator", address)
    assert installation.refused("operator", before) == []


def test_gateway_gets_no_forbidden_response(installation: Installation, namespace: str) -> None:
    server = installation.server
    before = server.audit.position()
    address = installation.run("gateway")
    apply(server, namespace, "chat", replicas=1)
    # The status is as the operator writes it.
    status = {"status": {"servedName": {"name": "chat", "since": "2026-01-01T00:00:00Z"}}}
    patch = ("--subresource=status", "--type=merge", "--patch", json.dumps(status))
    server.kubectl("patch", "llmdeployment", "chat", "-n", namespace, *patch)

    def models() -> list[str]:
        content = get(f"{address}/v1/models")
        return [] if content is None else [model["id"] for model in json.loads(content)["data"]]

    assert eventually(lambda: "chat" in models()), installation.log("gateway")
    assert installation.probes_pass("gateway", address)
    assert installation.refused("gateway", before) == []
