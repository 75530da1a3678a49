"""A real Kubernetes control plane on loopback, without nodes: etcd, kube-apiserver and kube-controller-manager.

Enough for whatever ends in API objects: Deployments make ReplicaSets, owners are garbage-collected, RBAC and CEL are
enforced. No kubelet: pods stay Pending. A node tier starts more processes on the same state folder, from its own file.
"""

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from quire_cluster import audit, kubeconfig
from quire_cluster.audit import AuditLog
from quire_cluster.binaries import Binaries
from quire_cluster.certificates import Authority, KeyPair
from quire_cluster.client import ApiClient
from quire_cluster.errors import ComponentFailed, KubectlFailed
from quire_cluster.guard import kill_all
from quire_cluster.kubeconfig import Server
from quire_cluster.ports import free_ports
from quire_cluster.processes import Guard, Process

PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
SERVICE_CLUSTER_IPS: Final = "10.96.0.0/16"
READY_SECONDS: Final = 60.0
USER_AGENT: Final = "quire-test-cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    api_server: int
    etcd: int
    etcd_peer: int


class ControlPlane:
    """Its processes, its address, and ways to look at it and to hurt it.

    `etcd`, `api_server` and `controller_manager` can each be killed, paused and started again: same ports, same data.
    """

    def __init__(self, *, state: Path, ports: Ports, binaries: Binaries) -> None:
        self.state = state
        self.binaries = binaries
        self._authority = Authority(state / "pki")
        self._guard: Guard | None = None
        self.server = Server(url=f"https://127.0.0.1:{ports.api_server}", authority=self._authority.pair.certificate)
        self.audit = AuditLog(state / "audit.log")
        self.admin_kubeconfig = state / "admin.kubeconfig"
        self.etcd = Process("etcd", lambda: _etcd(state, ports, binaries), state)
        self.api_server = Process("kube-apiserver", lambda: _api_server(state, ports, binaries, self._authority), state)
        self.controller_manager = Process(
            "kube-controller-manager",
            lambda: _controller_manager(binaries, self._authority, self.admin_kubeconfig),
            state,
        )

    @classmethod
    def create(cls, state: Path, binaries: Binaries) -> "ControlPlane":
        """A new one in an empty folder, not started yet."""
        api_server, etcd, etcd_peer = free_ports(3)
        ports = Ports(api_server=api_server, etcd=etcd, etcd_peer=etcd_peer)
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        (state / "ports.json").write_text(json.dumps(asdict(ports)))
        (state / "audit-policy.json").write_text(audit.POLICY)
        created = cls(state=state, ports=ports, binaries=binaries)
        created._make_identities()
        return created

    @classmethod
    def load(cls, state: Path, binaries: Binaries) -> "ControlPlane | None":
        """The one that an earlier run made in this folder; None when there is none, or only a half-made one."""
        if not (state / "admin.kubeconfig").exists():
            return None
        ports = Ports(**json.loads((state / "ports.json").read_text()))
        return cls(state=state, ports=ports, binaries=binaries)

    @classmethod
    def temporary(cls, binaries: Binaries) -> "ControlPlane":
        """In a folder that goes when this process ends, with all that was started in it."""
        created = cls.create(Path(tempfile.mkdtemp(prefix="quire-cluster-")), binaries)
        created._guard = Guard(created.state)
        return created

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.etcd, self.api_server, self.controller_manager)

    def start(self) -> None:
        """Starts what does not run; returns when the API answers and the controllers do their work."""
        for process in (self.etcd, self.api_server):
            if process.pid is None:
                process.start()
        self.wait_for_api_server()
        if self.controller_manager.pid is None:
            self.controller_manager.start()
        self.controller_manager.wait_until(self._controllers_work, timeout_seconds=READY_SECONDS)

    def stop(self) -> None:
        """Kills the processes (the API server would drain for a minute) and removes the state folder."""
        for process in reversed(self.processes):
            process.kill()
        kill_all(self.state)  # what others added
        if self._guard is not None:
            self._guard.release()
        shutil.rmtree(self.state, ignore_errors=True)

    def restart_api_server(self) -> None:
        """kill -9, start, wait until it answers."""
        self.api_server.kill()
        self.api_server.start()
        self.wait_for_api_server()

    def wait_for_api_server(self) -> None:
        self.api_server.wait_until(self.answers, timeout_seconds=READY_SECONDS)

    def answers(self) -> bool:
        try:
            return self.client().get("/readyz").ok
        except OSError:
            return False

    def client(self) -> ApiClient:
        """As the cluster's administrator."""
        return ApiClient(self.server, self._admin, user_agent=USER_AGENT)

    def kubectl(self, *arguments: str, stdin: str = "", as_user: Path | None = None) -> str:
        """What kubectl printed. `as_user` is a kubeconfig; without it the administrator."""
        command = [str(self.binaries["kubectl"]), "--cache-dir", str(self.state / "kubectl-cache"), *arguments]
        environment = os.environ | {"KUBECONFIG": str(as_user or self.admin_kubeconfig)}
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise KubectlFailed(done.stderr.strip())
        return done.stdout

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Whoever uses it is that ServiceAccount, with the rights RBAC gives it and no more."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        answer = self.client().post(
            path, {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        )
        if not answer.ok:
            raise ComponentFailed(f"no token for ServiceAccount {namespace}/{name}: {answer.body['message']}")
        token = answer.body["status"]["token"]
        return kubeconfig.write(
            self.state / f"{namespace}.{name}.kubeconfig", kubeconfig.with_token(self.server, token)
        )

    @property
    def _admin(self) -> KeyPair:
        return self._authority.issued("admin")

    def _make_identities(self) -> None:
        self._authority.create()
        names = "IP:127.0.0.1,IP:10.96.0.1,DNS:localhost,DNS:kubernetes.default.svc"
        self._authority.issue("apiserver", subject="/CN=kube-apiserver", alternative_names=names)
        admin = self._authority.issue("admin", subject="/O=system:masters/CN=admin", alternative_names="DNS:admin")
        kubeconfig.write(self.admin_kubeconfig, kubeconfig.with_certificate(self.server, admin))

    def _controllers_work(self) -> bool:
        """Every namespace is given a default ServiceAccount, without which no pod is admitted."""
        return self.client().get("/api/v1/namespaces/default/serviceaccounts/default").ok


def _etcd(state: Path, ports: Ports, binaries: Binaries) -> list[str]:
    client, peer = f"http://127.0.0.1:{ports.etcd}", f"http://127.0.0.1:{ports.etcd_peer}"
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


def _api_server(state: Path, ports: Ports, binaries: Binaries, authority: Authority) -> list[str]:
    serving = authority.issued("apiserver")
    return [
        str(binaries["kube-apiserver"]),
        f"--etcd-servers=http://127.0.0.1:{ports.etcd}",
        "--bind-address=127.0.0.1",
        f"--secure-port={ports.api_server}",
        "--endpoint-reconciler-type=none",  # it refuses to publish a loopback address
        f"--tls-cert-file={serving.certificate}",
        f"--tls-private-key-file={serving.key}",
        f"--client-ca-file={authority.pair.certificate}",
        f"--service-account-key-file={authority.service_account_key}",
        f"--service-account-signing-key-file={authority.service_account_key}",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_CLUSTER_IPS}",
        "--authorization-mode=RBAC",
        f"--audit-policy-file={state / 'audit-policy.json'}",
        f"--audit-log-path={state / 'audit.log'}",
        "--audit-log-mode=blocking",  # an entry is in the file before its request goes on
        "--audit-log-maxsize=100000",  # megabytes: positions in the file hold only while it is never begun anew
    ]


def _controller_manager(binaries: Binaries, authority: Authority, admin_kubeconfig: Path) -> list[str]:
    return [
        str(binaries["kube-controller-manager"]),
        f"--kubeconfig={admin_kubeconfig}",
        "--bind-address=127.0.0.1",
        "--secure-port=0",
        f"--service-account-private-key-file={authority.service_account_key}",
        f"--root-ca-file={authority.pair.certificate}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        "--kube-api-qps=500",
        "--kube-api-burst=1000",
        "--concurrent-deployment-syncs=20",
        "--concurrent-replicaset-syncs=20",
        "--horizontal-pod-autoscaler-sync-period=2s",
    ]
