"""The kubelet of a node: its configuration and its command line. Pure.

It runs in the network and mount namespaces of the node, so fixed paths belong to the node.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quire_cluster.certificates import KeyPair
from quire_cluster.nodes.containerd import SOCKET
from quire_cluster.nodes.plan import CLUSTER_DOMAIN, HOST_ADDRESS, NodePlan

GROUP: Final = "system:nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeletFiles:
    authority: Path
    serving: KeyPair
    resolv_conf: Path


def user(node: NodePlan) -> str:
    return f"system:node:{node.name}"


def subject(node: NodePlan) -> str:
    """Return the subject of its certificate in openssl's form."""
    return f"/O={GROUP}/CN={user(node)}"


def config(node: NodePlan, files: KubeletFiles) -> str:
    document: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": node.address,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(files.authority)},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(files.serving.certificate),
        "tlsPrivateKeyFile": str(files.serving.key),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "clusterDomain": CLUSTER_DOMAIN,
        "clusterDNS": [HOST_ADDRESS],
        "resolvConf": str(files.resolv_conf),
        "containerRuntimeEndpoint": f"unix://{SOCKET}",
        # Disk and memory belong to the host, whose user monitors them.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
        "kubeAPIQPS": 100,
        "kubeAPIBurst": 200,
        "readOnlyPort": 0,
    }
    return json.dumps(document, indent=2) + "\n"


def resolv_conf() -> str:
    """Return the resolver for pods that use the node's, and the first lines for other pods."""
    return f"nameserver {HOST_ADDRESS}\n"


def command(program: Path, node: NodePlan, *, config_file: Path, kubeconfig: Path) -> list[str]:
    return [
        str(program),
        f"--config={config_file}",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]
