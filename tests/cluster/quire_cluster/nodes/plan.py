"""The nodes and all names and addresses around them. Pure values.

Only one cluster with nodes can run per machine: the bridge, the addresses and the folders below /run are fixed, so
tests, images and people can refer to them.
"""

from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Final

from quire_cluster.components import SERVICE_CLUSTER_IPS

BRIDGE: Final = "quire0"
HOST_ADDRESS: Final = "10.77.0.1"
NODE_SUBNET: Final = "10.77.0.0/24"
CLUSTER_DOMAIN: Final = "cluster.local"
API_SERVER_PORT: Final = 6443
DNS_PORT: Final = 53
REGISTRY_PORT: Final = 5000
PROMETHEUS_PORT: Final = 9090
REGISTRY: Final = f"{HOST_ADDRESS}:{REGISTRY_PORT}"
PROMETHEUS_URL: Final = f"http://{HOST_ADDRESS}:{PROMETHEUS_PORT}"
CGROUP: Final = "quire"
RUN: Final = Path("/run/quire")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """Names and addresses of one node."""

    name: str
    address: str
    pod_subnet: str

    @property
    def network_namespace(self) -> str:
        """Return the name of the network namespace for `ip netns`."""
        return f"quire-{self.name}"

    @property
    def network_namespace_file(self) -> Path:
        return Path("/run/netns") / self.network_namespace

    @property
    def mount_namespace_file(self) -> Path:
        return RUN / "namespaces" / self.name

    @property
    def link(self) -> str:
        """Return the name of the host's end of the virtual link, at most 15 characters."""
        return f"quire-{self.name}"

    @property
    def cgroup(self) -> str:
        return f"{CGROUP}/{self.name}"

    @property
    def pod_gateway(self) -> str:
        return str(IPv4Network(self.pod_subnet)[1])


NODES: Final = (
    NodePlan(name="node-1", address="10.77.0.11", pod_subnet="10.77.1.0/24"),
    NodePlan(name="node-2", address="10.77.0.12", pod_subnet="10.77.2.0/24"),
)
SUBNETS: Final = (NODE_SUBNET, *(node.pod_subnet for node in NODES), SERVICE_CLUSTER_IPS)
