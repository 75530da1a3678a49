"""The cluster for ``scale.py``: a control plane with kwok nodes, and LLMDeployments that are not reconciled yet.

``quire_cluster`` is the tests' support package, so ``PYTHONPATH`` must name its folder.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.report import ROOT, cpu_seconds
from quire_cluster.binaries import ensure
from quire_cluster.client import ApiClient
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.fake_nodes import PROGRAMS as NODE_PROGRAMS
from quire_cluster.fake_nodes import FakeNodes
from quire_cluster.progress import Progress

CRD = ROOT / "crds" / "llmdeployments.yaml"
NAMESPACE = "scale"
REPLICAS, NODES = 3, 5
LIMIT_SECONDS = 1800.0


class Cluster:
    """A control plane with fake nodes and LLMDeployments that no operator has reconciled yet."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.plane = ControlPlane.temporary(ensure((*PROGRAMS, *NODE_PROGRAMS), Progress(sys.stderr)))
        self.plane.start()
        self.plane.kubectl("apply", "--server-side", "-f", str(CRD))
        self.plane.kubectl("wait", "--for=condition=Established", "--timeout=30s", "-f", str(CRD))
        self.nodes = FakeNodes(self.plane)
        self.nodes.start(NODES)
        self.client: ApiClient = self.plane.client()
        self.client.post("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        for number in range(count):
            answer = self.client.post(f"/apis/quire.dev/v1alpha1/namespaces/{NAMESPACE}/llmdeployments", body(number))
            assert answer.ok, answer.body

    def there(self, group: str, plural: str) -> int:
        """Return the number of objects of a kind: list one and let the server count the rest."""
        answer = self.client.get(f"/{group}/namespaces/{NAMESPACE}/{plural}?limit=1").body
        return len(answer["items"]) + int(answer["metadata"].get("remainingItemCount") or 0)

    def applied(self) -> bool:
        return (
            self.there("apis/apps/v1", "deployments") >= self.count
            and self.there("api/v1", "services") >= 2 * self.count
        )

    def serving(self) -> bool:
        """Return whether every Deployment has its replicas ready."""
        deployments = self.client.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments").body["items"]
        ready = sum(item["status"].get("readyReplicas", 0) for item in deployments)
        return bool(ready == REPLICAS * self.count)

    def told(self) -> bool:
        """Return whether every LLMDeployment reports that in its status."""
        resources = self.client.get(f"/apis/quire.dev/v1alpha1/namespaces/{NAMESPACE}/llmdeployments").body["items"]
        return sum(item.get("status", {}).get("readyReplicas", 0) for item in resources) == REPLICAS * self.count

    def cpu_seconds(self) -> float:
        """Return the CPU seconds that the cluster has used."""
        processes = (*self.plane.processes, self.nodes.scheduler, self.nodes.kwok)
        return sum(cpu_seconds(process.pid) for process in processes if process.pid is not None)

    def children(self) -> dict[str, int]:
        """Return the objects per kind that belong to LLMDeployments."""
        kinds = {
            "Deployment": ("apis/apps/v1", "deployments"),
            "Service": ("api/v1", "services"),
            "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
            "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
            "Pod": ("api/v1", "pods"),
        }
        return {kind: self.there(*where) for kind, where in kinds.items()}


def body(number: int) -> dict[str, Any]:
    """Return one LLMDeployment."""
    return {
        "apiVersion": "quire.dev/v1alpha1",
        "kind": "LLMDeployment",
        "metadata": {"name": f"model-{number:04}", "namespace": NAMESPACE},
        "spec": {"model": {"source": "file:///models/demo"}, "replicas": REPLICAS},
    }


def wait(look: Callable[[], bool], what: str, started: float, *, every: float = 1.0) -> float:
    """Return the seconds from ``started`` until ``look`` is true."""
    while not look():
        if time.monotonic() - started > LIMIT_SECONDS:
            sys.exit(f"not after {LIMIT_SECONDS:g} s: {what}")
        time.sleep(every)
    took = time.monotonic() - started
    print(f"  {what}: {took:.0f} s", file=sys.stderr)
    return took
