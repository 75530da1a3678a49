"""A node's kube-proxy: services are rewritten by the packet filter of the node's own network namespace. Pure."""

from pathlib import Path
from typing import Final

from quire_cluster.nodes.plan import NodePlan

USER: Final = "system:kube-proxy"
SUBJECT: Final = f"/CN={USER}"


def command(program: Path, node: NodePlan, kubeconfig: Path) -> list[str]:
    return [
        str(program),
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node.name}",
        "--proxy-mode=iptables",
        # Whoever is no pod of this node (the host is none) is masqueraded, so that the answer finds its way back here.
        f"--cluster-cidr={node.pod_subnet}",
        "--conntrack-max-per-core=0",  # the kernel lets no namespace but the first set these
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--iptables-min-sync-period=200ms",
        "--nodeport-addresses=primary",
    ]
