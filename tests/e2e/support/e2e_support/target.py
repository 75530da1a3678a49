"""The cluster that scenarios run on: what it is, what it has, and the ways into it.

Made by ``own`` (this machine's, whose Services are reached directly) or by ``theirs`` (that of KUBECONFIG, through
`kubectl proxy`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e_support import objects
from e2e_support.capabilities import Capability
from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Node, Pod
from quire_cluster.real_cluster import RealCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A cluster that answers."""

    kube: Kube
    helm_program: Path
    name: str
    """For people."""
    machine: RealCluster | None
    """Our own cluster, which may be hurt; None where it is somebody else's."""
    capabilities: frozenset[Capability]
    engine_image: str
    chart_values: Mapping[str, Any]
    """Where images and Prometheus are."""
    proxy: str = ""
    """Where `kubectl proxy` listens; empty where Services are reached directly."""

    def nodes(self) -> list[Node]:
        return [objects.node(body) for body in self.kube.items("/api/v1/nodes")]

    def service_url(self, namespace: str, name: str, *, port: str = "http") -> str:
        """Where the Service answers, from here."""
        if self.proxy:
            return f"{self.proxy}{namespaced(namespace, 'services', name)}:{port}/proxy"
        spec = self.kube.get(namespaced(namespace, "services", name))["spec"]
        number = next(found["port"] for found in spec["ports"] if found["name"] == port)
        return f"http://{spec['clusterIP']}:{number}"

    def pod_url(self, pod: Pod, port: int) -> str:
        """Where one pod answers, from here; while the API server is away only on our own cluster."""
        if self.proxy:
            return f"{self.proxy}{namespaced(pod.namespace, 'pods', pod.name)}:{port}/proxy"
        return f"http://{pod.ip}:{port}"
