"""The network: a bridge on the host, a network namespace with a virtual link for each node, and routes between them.

kube-proxy and the network plugin write only into the namespaces of the nodes; the host's packet filter is never
changed. Pods have no internet access: nodes have routes only to each other, to the host and to the services. Each list
of commands may be repeated.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Final

from quire_cluster.components import SERVICE_CLUSTER_IPS
from quire_cluster.nodes.plan import BRIDGE, HOST_ADDRESS, NODE_SUBNET, NodePlan
from quire_cluster.shell import run, succeeds

PREFIX: Final = IPv4Network(NODE_SUBNET).prefixlen
# The service rules must also process packets between pods on one bridge, to rewrite their answers.
SETTINGS: Final = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")

Command = list[str]


def bridge_commands() -> list[Command]:
    return [
        ["ip", "address", "replace", f"{HOST_ADDRESS}/{PREFIX}", "dev", BRIDGE],
        ["ip", "link", "set", BRIDGE, "up"],
    ]


def node_commands(node: NodePlan, others: Sequence[NodePlan]) -> list[Command]:
    """Return the commands for a node, whose namespace and link exist."""
    inside = ["ip", "-netns", node.network_namespace]
    return [
        ["ip", "link", "set", node.link, "master", BRIDGE, "up"],
        [*inside, "link", "set", "lo", "up"],
        [*inside, "address", "replace", f"{node.address}/{PREFIX}", "dev", "eth0"],
        [*inside, "link", "set", "eth0", "up"],
        [
            *inside,
            "route",
            "replace",
            SERVICE_CLUSTER_IPS,
            "via",
            HOST_ADDRESS,
        ],  # for its own requests, which are rewritten immediately
        *([*inside, "route", "replace", other.pod_subnet, "via", other.address] for other in others),
        [*in_network(node), "sh", "-c", "; ".join(f"echo 1 > /proc/sys/{setting}" for setting in SETTINGS)],
    ]


def host_routes(nodes: Sequence[NodePlan]) -> list[Command]:
    """Return the host's routes to pods through their nodes, and to services through the first node."""
    return [
        *(["ip", "route", "replace", node.pod_subnet, "via", node.address] for node in nodes),
        ["ip", "route", "replace", SERVICE_CLUSTER_IPS, "via", nodes[0].address],
    ]


def in_network(node: NodePlan) -> Command:
    """Return the prefix of a command that uses the node's network and the host's files."""
    return ["nsenter", f"--net={node.network_namespace_file}", "--"]


def ensure(nodes: Sequence[NodePlan]) -> None:
    if not _link_exists(BRIDGE):
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    _all(bridge_commands())
    for node in nodes:
        # The file may remain from a namespace that is gone, for example after a restart of the machine.
        if not succeeds([*in_network(node), "true"]):
            node.network_namespace_file.unlink(missing_ok=True)
            run(["ip", "netns", "add", node.network_namespace])
        if not _link_exists(node.link):
            peer = ["peer", "name", "eth0", "netns", node.network_namespace]
            run(["ip", "link", "add", node.link, "type", "veth", *peer])
        _all(node_commands(node, [other for other in nodes if other != node]))
    _all(host_routes(nodes))


def remove(nodes: Sequence[NodePlan]) -> None:
    """Remove the network. Routes disappear with the bridge, and links of pods with their namespaces."""
    for node in nodes:
        if _link_exists(node.link):
            run(["ip", "link", "delete", node.link])
        if node.network_namespace_file.exists():
            run(["ip", "netns", "delete", node.network_namespace])
    if _link_exists(BRIDGE):
        run(["ip", "link", "delete", BRIDGE])


def _link_exists(name: str) -> bool:
    """Return True if the link exists. /sys may show another namespace."""
    return succeeds(["ip", "link", "show", "dev", name])


def _all(commands: Sequence[Command]) -> None:
    for command in commands:
        run(command)
