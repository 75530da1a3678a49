"""The target cluster of the scenarios: its description, its capabilities, its addresses, and its settings.

``own`` creates it for this machine, whose Services are reachable directly. ``theirs`` creates it for KUBECONFIG,
through `kubectl proxy`. A scenario declares its needs with ``@pytest.mark.needs("machine")``; our own cluster has all
capabilities. Settings come from the environment:

KUBECONFIG                 run on that cluster instead of our own
QUIRE_E2E_REGISTRY         registry from which its nodes pull quire-operator, quire-gateway and quire-engine
QUIRE_E2E_TAG              tag of these images
QUIRE_E2E_PROMETHEUS_URL   address of its Prometheus as seen from pods, if one scrapes the pods
KEEP=1                     keep release and cluster at the end
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from e2e_support import objects
from e2e_support.errors import TargetUnavailable
from e2e_support.kube import Kube, namespaced
from e2e_support.objects import Node, Pod
from quire_cluster.real_cluster import RealCluster


class Capability(StrEnum):
    """A capability; its value is the argument of the marker."""

    MACHINE = "machine"
    PROMETHEUS = "prometheus"
    TWO_NODES = "two-nodes"
    FAKE_NODES = "fake-nodes"


LACK = {
    Capability.MACHINE: "it stops the API server, Prometheus or a kubelet, which only our own cluster lets it do",
    Capability.PROMETHEUS: "it needs a Prometheus that scrapes the pods; name it by QUIRE_E2E_PROMETHEUS_URL",
    Capability.TWO_NODES: "it needs two nodes that are ready and take pods",
    Capability.FAKE_NODES: "it needs nodes of kwok with nvidia.com/gpu",
}
EVERYTHING = frozenset(Capability)


def capability(name: str) -> Capability:
    """Return the capability of that name. Raise ``TargetUnavailable`` for an unknown name."""
    try:
        return Capability(name)
    except ValueError:
        known = ", ".join(Capability)
        raise TargetUnavailable(f"needs({name!r}): there is no such capability; there are {known}") from None


def lacking(needs: Iterable[Capability], *, has: frozenset[Capability]) -> str:
    """Return why a scenario with these needs cannot run, or an empty string."""
    missing = [need for need in dict.fromkeys(needs) if need not in has]
    return "; ".join(LACK[need] for need in missing)


def found_on(nodes: Sequence[Node], *, prometheus_url: str) -> frozenset[Capability]:
    """Return the capabilities of a user's cluster."""
    able = [node for node in nodes if node.is_ready and node.is_schedulable and not node.is_fake]
    found = {
        Capability.PROMETHEUS: bool(prometheus_url),
        Capability.TWO_NODES: len(able) >= 2,
        Capability.FAKE_NODES: any(node.is_fake for node in nodes),
    }
    return frozenset(name for name, is_there in found.items() if is_there)


@dataclass(frozen=True, slots=True, kw_only=True)
class TheirCluster:
    """A user's cluster and its settings."""

    kubeconfig: str
    registry: str
    tag: str
    prometheus_url: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    theirs: TheirCluster | None
    """The user's cluster, or None for our own cluster on this machine."""
    keep: bool

    @classmethod
    def parse(cls, environ: Mapping[str, str]) -> "Settings":
        """Parse the environment. Raise ``TargetUnavailable`` with all missing settings."""
        keep = environ.get("KEEP", "") not in ("", "0")
        kubeconfig = environ.get("KUBECONFIG", "")
        if not kubeconfig:
            return cls(theirs=None, keep=keep)
        wanted = {
            "QUIRE_E2E_REGISTRY": "where the cluster's nodes find the images, such as registry.example/team",
            "QUIRE_E2E_TAG": "the images' tag",
        }
        missing = [f"  {name}: {meaning}" for name, meaning in wanted.items() if not environ.get(name)]
        if missing:
            raise TargetUnavailable(
                f"KUBECONFIG is {kubeconfig}: the scenarios would run on that cluster, install quire there and remove "
                "it again. For that set\n"
                + "\n".join(missing)
                + "\nor unset KUBECONFIG to run on a cluster of this machine."
            )
        return cls(
            theirs=TheirCluster(
                kubeconfig=kubeconfig,
                registry=environ["QUIRE_E2E_REGISTRY"],
                tag=environ["QUIRE_E2E_TAG"],
                prometheus_url=environ.get("QUIRE_E2E_PROMETHEUS_URL", ""),
            ),
            keep=keep,
        )


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
