"""Operator and gateway at work with the rights the chart gives them: nothing is refused, in either mode.

They are run here as the chart's containers are told to, as the ServiceAccounts it makes; the audit log is the witness.
"""

import json
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.audit import Position
from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.helm import Helm
from quire_cluster.ports import free_ports
from quire_cluster.waiting import eventually

CHART = Path(__file__).parents[2] / "charts" / "quire"


class Installation:
    """A release, and its processes on this machine."""

    def __init__(self, helm: Helm, server: ControlPlane, values: dict[str, Any], namespace: str, logs: Path) -> None:
        self.helm, self.server, self.values, self.namespace, self._logs = helm, server, values, namespace, logs
        self.name = f"quire-{uuid.uuid4().hex[:6]}"
        self._running = ExitStack()

    def __enter__(self) -> "Installation":
        self.helm.on_chart("install", self.name, f"--namespace={self.namespace}", values=self.values)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self.helm.run("uninstall", self.name, f"--namespace={self.namespace}")

    def account(self, component: str) -> str:
        return f"system:serviceaccount:{self.namespace}:{self.name}-{component}"

    def container(self, component: str) -> dict[str, Any]:
        documents = self.helm.template(self.values, release=self.name, namespace=self.namespace)
        name = f"{self.name}-{component}"
        (deployment,) = [d for d in documents if d["kind"] == "Deployment" and d["metadata"]["name"] == name]
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert isinstance(container, dict)
        return container

    def run(self, component: str) -> str:
        """Starts the component; where it listens."""
        (port,) = free_ports(1)
        kubeconfig = self.server.service_account_kubeconfig(self.namespace, f"{self.name}-{component}")
        command = [
            *(sys.executable, "-m", f"quire_{component}"),
            *self.container(component)["args"],
            *("--kubeconfig", str(kubeconfig), "--host", "127.0.0.1", "--port", str(port)),
        ]
        log = self._running.enter_context((self._logs / f"{component}.log").open("w"))
        process = subprocess.Popen(command, stdout=log, stderr=log)
        self._running.callback(process.wait)
        self._running.callback(process.kill)
        return f"http://127.0.0.1:{port}"

    def probes_pass(self, component: str, address: str) -> bool:
        probes = [value for key, value in self.container(component).items() if key.endswith("Probe")]
        assert len(probes) == 3
        return all(get(address + probe["httpGet"]["path"]) is not None for probe in probes)

    def log(self, component: str) -> str:
        return (self._logs / f"{component}.log").read_text()

    def refused(self, component: str, since: Position) -> list[str]:
        asked = self.server.audit.requests(since, user=self.account(component))
        assert asked
        return [str(request) for request in asked if request.status == 403]


def get(url: str) -> bytes | None:
    """None for whatever is not 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            content: bytes = answer.read()
            return content
    except (urllib.error.URLError, ConnectionError):
        return None


@pytest.fixture(params=["all namespaces", "some namespaces"])
def installation(
    request: pytest.FixtureRequest, cluster_binaries: Binaries, crd_server: ControlPlane, namespace: str, tmp_path: Path
) -> Iterator[Installation]:
    """In a namespace of its own; `namespace` is where LLMDeployments are."""
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
    model = {"source": "hf://org/model", "cache": {"size": "1Gi"}}
    body = {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": name},
        "spec": {"model": model} | spec,
    }
    server.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))


def test_the_operator_is_refused_nothing(installation: Installation, namespace: str) -> None:
    """It makes all kinds of children, repairs one, scales, tells it, and lets one go that is no longer wanted."""
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


def test_the_gateway_is_refused_nothing(installation: Installation, namespace: str) -> None:
    server = installation.server
    before = server.audit.position()
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "chat",
            "labels": {"quire.dev/llmdeployment": "chat"},
            "annotations": {"quire.dev/served-name": "chat"},
        },
        "spec": {"ports": [{"name": "http", "port": 8000}]},
    }
    address = installation.run("gateway")
    server.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(service))

    def models() -> list[str]:
        content = get(f"{address}/v1/models")
        return [] if content is None else [model["id"] for model in json.loads(content)["data"]]

    assert eventually(lambda: "chat" in models()), installation.log("gateway")
    assert installation.probes_pass("gateway", address)
    assert installation.refused("gateway", before) == []
