"""The wires: a bridge on the host, a network namespace with a cable to it for each node, and routes between them.

Everything kube-proxy and the network plugin write goes into the nodes' namespaces; the host's packet filter is never
touched. Pods have no way out to the world: nodes know a route to each other, to the host and to the services, no more.
Each list of commands may be run again over what is there.
"""

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Final

from quire_cluster.components import SERVICE_CLUSTER_IPS
from quire_cluster.nodes.plan import BRIDGE, HOST_ADDRESS, NODE_SUBNET, NodePlan
from quire_cluster.nodes.shell import run, succeeds

PREFIX: Final = IPv4Network(NODE_SUBNET).prefixlen
# Packets between pods on one bridge must be seen by the service rules too: their answers have to be rewritten.
SETTINGS: Final = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")

Command = list[str]


def bridge_commands() -> list[Command]:
    return [
        ["ip", "address", "replace", f"{HOST_ADDRESS}/{PREFIX}", "dev", BRIDGE],
        ["ip", "link", "set", BRIDGE, "up"],
    ]


def node_commands(node: NodePlan, others: Sequence[NodePlan]) -> list[Command]:
    """Once the namespace and the cable exist."""
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
        ],  # for its own requests: rewritten at once
        *([*inside, "route", "replace", other.pod_subnet, "via", other.address] for other in others),
        [*in_network(node), "sh", "-c", "; ".join(f"echo 1 > /proc/sys/{setting}" for setting in SETTINGS)],
    ]


def host_routes(nodes: Sequence[NodePlan]) -> list[Command]:
    """To pods by their nodes; to services by the first node, which masquerades for who is no pod of its own."""
    return [
        *(["ip", "route", "replace", node.pod_subnet, "via", node.address] for node in nodes),
        ["ip", "route", "replace", SERVICE_CLUSTER_IPS, "via", nodes[0].address],
    ]


def in_network(node: NodePlan) -> Command:
    """Put before a command that runs with the node's network and the host's files."""
    return ["nsenter", f"--net={node.network_namespace_file}", "--"]


def ensure(nodes: Sequence[NodePlan]) -> None:
    if not _link_exists(BRIDGE):
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
    _all(bridge_commands())
    for node in nodes:
        # The file may be left of a namespace that is gone, as after a restart of the machine.
        if not succeeds([*in_network(node), "true"]):
            node.network_namespace_file.unlink(missing_ok=True)
            run(["ip", "netns", "add", node.network_namespace])
        if not _link_exists(node.link):
            peer = ["peer", "name", "eth0", "netns", node.network_namespace]
            run(["ip", "link", "add", node.link, "type", "veth", *peer])
        _all(node_commands(node, [other for other in nodes if other != node]))
    _all(host_routes(nodes))


def remove(nodes: Sequence[NodePlan]) -> None:
    """Routes go with the bridge, pods' cables with their namespaces."""
    for node in nodes:
        if _link_exists(node.link):
            run(["ip", "link", "delete", node.link])
        if node.network_namespace_file.exists():
            run(["ip", "netns", "delete", node.network_namespace])
    if _link_exists(BRIDGE):
        run(["ip", "link", "delete", BRIDGE])


def _link_exists(name: str) -> bool:
    """By asking, not by /sys, which may show another namespace's."""
    return succeeds(["ip", "link", "show", "dev", name])


def _all(commands: Sequence[Command]) -> None:
    for command in commands:
        run(command)
