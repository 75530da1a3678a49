"""The target cluster of the scenarios: its description, its capabilities and its addresses.

``own`` creates it for this machine, whose Services are reachable directly. ``theirs`` creates it for KUBECONFIG,
through `kubectl proxy`.
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
    """The description for people."""
    machine: RealCluster | None
    """Our own cluster, in which faults may be injected, or None for a user's cluster."""
    capabilities: frozenset[Capability]
    engine_image: str
    chart_values: Mapping[str, Any]
    """The locations of images and Prometheus."""
    proxy: str = ""
    """The address of `kubectl proxy`, or an empty string if Services are reachable directly."""

    def nodes(self) -> list[Node]:
        return [objects.node(body) for body in self.kube.items("/api/v1/nodes")]

    def service_url(self, namespace: str, name: str, *, port: str = "http") -> str:
        """Return the address of the Service as reached from here."""
        if self.proxy:
            return f"{self.proxy}{namespaced(namespace, 'services', name)}:{port}/proxy"
        spec = self.kube.get(namespaced(namespace, "services", name))["spec"]
        number = next(found["port"] for found in spec["ports"] if found["name"] == port)
        return f"http://{spec['clusterIP']}:{number}"

    def pod_url(self, pod: Pod, port: int) -> str:
        """Return the address of a pod as reached from here. Without the API server it works only on our own cluster."""
        if self.proxy:
            return f"{self.proxy}{namespaced(pod.namespace, 'pods', pod.name)}:{port}/proxy"
        return f"http://{pod.ip}:{port}"
