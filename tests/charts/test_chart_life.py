"""The chart over time, on its own control plane: upgrade, uninstall and reinstall while an operator works.

The served models must not be affected: no LLMDeployment is edited, and no child is recreated or changed.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from chart_support.installation import Installation, get

from quire_cluster.binaries import Binaries
from quire_cluster.control_plane import ControlPlane
from quire_cluster.crds import wait_established
from quire_cluster.errors import HelmFailed
from quire_cluster.helm import Helm
from quire_cluster.waiting import eventually

CHART = Path(__file__).parents[2] / "charts" / "quire"
CRD, NAMESPACE, HOME = "llmdeployments.quire.dev", "llm", "quire-system"
CHILDREN = "deployments,services,serviceaccounts,poddisruptionbudgets,networkpolicies"
CHAT = {
    "apiVersion": "quire.dev/v1alpha1",
    "kind": "LLMDeployment",
    "metadata": {"name": "chat"},
    "spec": {"model": {"source": "pvc://models/demo"}, "replicas": 2},
}


@pytest.fixture(scope="module")
def server(cluster_binaries: Binaries) -> Iterator[ControlPlane]:
    """Yield a control plane that has never had the CRD."""
    server = ControlPlane.temporary(cluster_binaries)
    try:
        server.start()
        for namespace in (NAMESPACE, HOME):
            server.kubectl("create", "namespace", namespace)
        yield server
    finally:
        server.stop()


class Life:
    """A release and the objects that it serves."""

    def __init__(self, helm: Helm, server: ControlPlane, logs: Path) -> None:
        self.server = server
        self.release = Installation(helm, server, {}, HOME, logs)
        self.release.name = "quire"  # the CRD stays, and belongs to releases of this name

    @contextmanager
    def operator(self) -> Iterator[Callable[[], str]]:
        """Yield a function that returns the metrics, while the operator leads. It ends like a killed container."""
        position = self.server.audit.position()
        with self.release.running("operator") as address:

            def page() -> str:
                return (get(f"{address}/metrics") or b"").decode()

            def settled() -> bool:
                figures = dict(line.rsplit(" ", 1) for line in page().splitlines() if not line.startswith("#"))
                passes = float(figures.get("quire_operator_reconcile_seconds_count", 0))
                return passes >= 1 and figures["quire_operator_leading"] == "1.0" and self.is_told()

            assert eventually(settled), self.release.log("operator")
            yield page
            assert self.release.refused("operator", position) == []

    def is_told(self) -> bool:
        return self.field("status.observedGeneration") == self.field("metadata.generation") != ""

    def field(self, path: str) -> str:
        return self.server.kubectl("get", "llmd", "chat", "-n", NAMESPACE, "-o", f"jsonpath={{.{path}}}")

    def served(self) -> dict[str, Any]:
        """Return the identity of every object and the version of its spec."""
        text = self.server.kubectl("get", f"llmd,{CHILDREN}", "-n", NAMESPACE, "-o", "json")
        found = {}
        for item in json.loads(text)["items"]:
            metadata = item["metadata"]
            if item["kind"] == "LLMDeployment" or "quire.dev/llmdeployment" in metadata.get("labels", {}):
                told = metadata.get("generation", metadata["resourceVersion"])
                found[f"{item['kind']}/{metadata['name']}"] = (metadata["uid"], told)
        return found

    def lease(self) -> dict[str, Any]:
        """Return the Lease's holder, which is the pod.

        A restarted container is the same holder and never waits for itself.
        """
        spec = json.loads(self.server.kubectl("get", "lease", "quire-operator", "-n", HOME, "-o", "json"))["spec"]
        return {name: spec[name] for name in ("holderIdentity", "leaseTransitions")}

    def objects(self) -> set[str]:
        """Return the release's own objects."""
        kinds = "deployments,services,serviceaccounts,poddisruptionbudgets,roles,rolebindings,clusterroles"
        selector = f"--selector=app.kubernetes.io/instance={self.release.name}"
        return set(self.server.kubectl("get", kinds, "-A", selector, "-o", "name").split())


@pytest.fixture
def life(cluster_binaries: Binaries, server: ControlPlane, tmp_path: Path) -> Life:
    helm = Helm(cluster_binaries["helm"], CHART, tmp_path, kubeconfig=server.admin_kubeconfig)
    return Life(helm, server, tmp_path)


def test_serving_survives_upgrade_uninstall_and_reinstall(life: Life) -> None:
    server = life.server
    with life.release:
        wait_established(server.client(), CRD)
        server.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(CHAT))
        with life.operator() as page:
            served = life.served()
            who = f'namespace="{NAMESPACE}",name="chat"'
            assert f'quire_operator_llmdeployment_info{{{who},model_name="chat"}} 1' in page()
            assert f'quire_operator_llmdeployment_condition{{{who},type="Ready",status="False"' in page()
            assert f'quire_operator_llmdeployment_replicas{{{who},state="asked"}} 2' in page()
            (lag,) = re.findall(r"^quire_operator_watch_lag_seconds (.+)$", page(), re.MULTILINE)
            assert 0 <= float(lag) < 60
        assert {name.partition("/")[0] for name in served} >= {"LLMDeployment", "Deployment", "Service"}

        life.release.upgrade({"operator": {"logLevel": "debug", "workers": 4}, "gateway": {"replicas": 3}})
        assert life.served() == served
        with life.operator():
            assert life.served() == served
        assert life.lease() == {"holderIdentity": f"quire-operator-0_{life.release.uid}", "leaseTransitions": 0}
    assert life.objects() == set()
    assert life.served() == served, "without an operator what serves goes on serving"
    with life.release, life.operator():
        assert life.served() == served, "and the next one takes it for its own"
        server.kubectl("patch", "llmd", "chat", "-n", NAMESPACE, "--type=merge", "-p", '{"spec": {"replicas": 3}}')
        replicas = ("get", "deployment", "chat", "-n", NAMESPACE, "-o", "jsonpath={.spec.replicas}")
        assert eventually(lambda: server.kubectl(*replicas) == "3"), life.release.log("operator")


def test_upgrade_updates_the_crd_and_keeps_resources(life: Life, cluster_binaries: Binaries, tmp_path: Path) -> None:
    """Helm never updates files in a chart's crds/ folder, so our CRD is a template."""
    server = life.server
    with life.release:
        wait_established(server.client(), CRD)
        server.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=json.dumps(CHAT))
        before = life.field("metadata.uid")
        newer = tmp_path / "newer" / "quire"
        shutil.copytree(CHART, newer)
        template = newer / "templates" / "crds" / "llmdeployments.yaml"
        old = "        - name: Age\n"
        text = template.read_text()
        assert text.count(old) == 1
        column = "        - {name: Generation, type: integer, jsonPath: .metadata.generation}\n"
        template.write_text(text.replace(old, column + old))
        life.release.helm = Helm(cluster_binaries["helm"], newer, tmp_path, kubeconfig=server.admin_kubeconfig)
        life.release.upgrade({})
        assert eventually(lambda: "GENERATION" in server.kubectl("get", "llmd", "-n", NAMESPACE))
        assert life.field("metadata.uid") == before
    assert life.field("metadata.uid") == before


def test_upgrade_keeps_the_scaled_number_of_gateways(life: Life) -> None:
    autoscaled = {"gateway": {"autoscaling": {"enabled": True, "minReplicas": 1, "maxReplicas": 9}}}
    name = f"{life.release.name}-gateway"
    replicas = ("get", "deployment", name, "-n", HOME, "-o", "jsonpath={.spec.replicas}")
    life.release.values = autoscaled
    with life.release:
        life.server.kubectl("scale", f"deployment/{name}", "--replicas=7", "-n", HOME)
        life.release.upgrade(autoscaled | {"operator": {"workers": 4}})
        assert life.server.kubectl(*replicas) == "7"
        life.release.upgrade({"gateway": {"autoscaling": {"enabled": False}}})
        assert life.server.kubectl(*replicas) == "2", "the chart's own again"


def test_crd_is_adopted_by_another_release_on_request(life: Life) -> None:
    """At the end the CRD is taken back, because other tests install a release of the usual name."""
    with life.release:
        wait_established(life.server.client(), CRD)
    life.release.name = "other"
    with pytest.raises(HelmFailed, match="invalid ownership metadata"), life.release:
        pass
    life.release.install_flags = ("--take-ownership",)
    owner = ("get", "crd", CRD, "-o", r"jsonpath={.metadata.annotations.meta\.helm\.sh/release-name}")
    with life.release:
        assert life.server.kubectl(*owner) == "other"
    life.release.name = "quire"
    with life.release:
        assert life.server.kubectl(*owner) == "quire"
