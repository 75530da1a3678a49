"""Command lines of the control plane's processes. Pure.

`control_plane` and `fake_nodes` manage the processes. A control plane without nodes uses only loopback; one with nodes
is reachable from them and their pods, and reaches the kubelets.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.binaries import Binaries
from quire_cluster.certificates import Authority

SERVICE_CLUSTER_IPS: Final = "10.96.0.0/16"
API_SERVER_CLUSTER_IP: Final = "10.96.0.1"
KUBELET_CLIENT: Final = "kubelet-client"
LOOPBACK: Final = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    api_server: int
    etcd: int
    etcd_peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The address of the API server, and whether kubelets join it."""

    address: str = LOOPBACK
    has_nodes: bool = False

    @property
    def certificate_names(self) -> str:
        addresses = dict.fromkeys((LOOPBACK, self.address, API_SERVER_CLUSTER_IP))
        names = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
        return ",".join((*(f"IP:{address}" for address in addresses), *(f"DNS:{name}" for name in names)))


def etcd(state: Path, ports: Ports, binaries: Binaries) -> list[str]:
    client, peer = f"http://{LOOPBACK}:{ports.etcd}", f"http://{LOOPBACK}:{ports.etcd_peer}"
    return [
        str(binaries["etcd"]),
        f"--data-dir={state / 'etcd'}",
        "--unsafe-no-fsync",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
    ]


def api_server(state: Path, ports: Ports, binaries: Binaries, authority: Authority, site: Site) -> list[str]:
    serving = authority.issued("apiserver")
    return [
        str(binaries["kube-apiserver"]),
        f"--etcd-servers=http://{LOOPBACK}:{ports.etcd}",
        f"--bind-address={site.address}",
        f"--secure-port={ports.api_server}",
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--client-ca-file={authority.pair.certificate}",
        f"--service-account-key-file={authority.service_account_key}",
        f"--service-account-signing-key-file={authority.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_CLUSTER_IPS}",
        f"--audit-policy-file={state / 'audit-policy.json'}",
        f"--audit-log-path={state / 'audit.log'}",
        "--audit-log-mode=blocking",  # an entry is written before its request continues
        "--audit-log-maxsize=100000",  # megabytes: positions are valid only if the file is never rotated
        *(_for_nodes(authority) if site.has_nodes else _without_nodes()),
    ]


def _without_nodes() -> list[str]:
    return [
        "--endpoint-reconciler-type=none",  # it refuses to publish a loopback address
        "--authorization-mode=RBAC",
    ]


def _for_nodes(authority: Authority) -> list[str]:
    client = authority.issued(KUBELET_CLIENT)
    return [
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--kubelet-client-certificate={client.certificate}",
        f"--kubelet-client-key={client.key}",
        f"--kubelet-certificate-authority={authority.pair.certificate}",
        "--kubelet-preferred-address-types=InternalIP",  # the names of nodes are not resolvable
    ]


def controller_manager(binaries: Binaries, authority: Authority, admin_kubeconfig: Path) -> list[str]:
    return [
        str(binaries["kube-controller-manager"]),
        f"--kubeconfig={admin_kubeconfig}",
        f"--bind-address={LOOPBACK}",
        "--secure-port=0",
        f"--service-account-private-key-file={authority.service_account_key}",
        f"--root-ca-file={authority.pair.certificate}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--concurrent-deployment-syncs=20",
        "--concurrent-replicaset-syncs=20",
        # By default a node without heartbeats for 50 s is lost, and its pods leave their Services. While the only API
        # server is unavailable, none arrive. Afterwards the result would depend on a race with the kubelets.
        "--node-monitor-grace-period=5m",
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]


def scheduler(binaries: Binaries, kubeconfig: Path) -> list[str]:
    return [
        str(binaries["kube-scheduler"]),
        f"--kubeconfig={kubeconfig}",
        "--leader-elect=false",
        f"--bind-address={LOOPBACK}",
        "--secure-port=0",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
    ]
