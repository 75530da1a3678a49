"""The kube-proxy of a node: the packet filter of its network namespace rewrites services. Pure."""

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
        # Clients other than pods of this node are masqueraded, so that answers return through this node.
        f"--cluster-cidr={node.pod_subnet}",
        "--conntrack-max-per-core=0",  # the kernel permits these settings only in the first namespace
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--iptables-min-sync-period=200ms",
        "--nodeport-addresses=primary",
    ]
