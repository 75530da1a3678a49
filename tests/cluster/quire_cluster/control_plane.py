"""A real Kubernetes control plane without nodes: etcd, kube-apiserver and kube-controller-manager.

It is sufficient for tests of API objects: Deployments create ReplicaSets, owners are garbage-collected, RBAC and CEL
are enforced. Without a kubelet, pods stay Pending. `fake_nodes` and `real_cluster` start more processes in the same
state folder.
"""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from quire_cluster import audit, components, kubeconfig
from quire_cluster.audit import AuditLog
from quire_cluster.binaries import Binaries
from quire_cluster.certificates import Authority, KeyPair
from quire_cluster.client import ApiClient
from quire_cluster.components import KUBELET_CLIENT, Ports, Site
from quire_cluster.errors import ComponentFailed, KubectlFailed
from quire_cluster.guard import kill_all
from quire_cluster.kubeconfig import Server
from quire_cluster.ports import free_ports
from quire_cluster.processes import Guard, Process

PROGRAMS: Final = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl")
READY_SECONDS: Final = 180.0
USER_AGENT: Final = "quire-test-cluster"
ON_LOOPBACK: Final = Site()


class ControlPlane:
    """A control plane: its processes, its address, and methods to observe and disturb it.

    `etcd`, `api_server` and `controller_manager` can each be killed, paused and restarted with the same ports and data.
    """

    def __init__(self, *, state: Path, ports: Ports, binaries: Binaries, site: Site = ON_LOOPBACK) -> None:
        self.state = state
        self.binaries = binaries
        self._authority = Authority(state / "pki")
        self._guard: Guard | None = None
        self._site = site
        self.server = Server(
            url=f"https://{site.address}:{ports.api_server}", authority=self._authority.pair.certificate
        )
        self.audit = AuditLog(state / "audit.log")
        self.admin_kubeconfig = state / "admin.kubeconfig"
        self.etcd = Process("etcd", lambda: components.etcd(state, ports, binaries), state)
        self.api_server = Process(
            "kube-apiserver", lambda: components.api_server(state, ports, binaries, self._authority, site), state
        )
        self.controller_manager = Process(
            "kube-controller-manager",
            lambda: components.controller_manager(binaries, self._authority, self.admin_kubeconfig),
            state,
        )

    @classmethod
    def create(
        cls, state: Path, binaries: Binaries, *, site: Site = ON_LOOPBACK, api_server_port: int | None = None
    ) -> "ControlPlane":
        """Create a control plane in an empty folder without starting it. By default the API server gets a free port."""
        api_server, etcd, etcd_peer = free_ports(3)
        ports = Ports(api_server=api_server_port or api_server, etcd=etcd, etcd_peer=etcd_peer)
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        (state / "ports.json").write_text(json.dumps(asdict(ports)))
        (state / "audit-policy.json").write_text(audit.POLICY)
        created = cls(state=state, ports=ports, binaries=binaries, site=site)
        created._make_identities()
        return created

    @classmethod
    def load(cls, state: Path, binaries: Binaries, *, site: Site = ON_LOOPBACK) -> "ControlPlane | None":
        """Return the control plane of an earlier run in this folder, or None if it is missing or incomplete."""
        if not (state / "admin.kubeconfig").exists():
            return None
        ports = Ports(**json.loads((state / "ports.json").read_text()))
        return cls(state=state, ports=ports, binaries=binaries, site=site)

    @classmethod
    def temporary(cls, binaries: Binaries) -> "ControlPlane":
        """Provide a control plane in a folder that is removed with all its processes when this process ends."""
        created = cls.create(Path(tempfile.mkdtemp(prefix="quire-cluster-")), binaries)
        created._guard = Guard(created.state)
        return created

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.etcd, self.api_server, self.controller_manager)

    def start(self) -> None:
        """Start all processes that do not run; return when the API answers and the controllers work."""
        if self.etcd.pid is None:
            self.api_server.kill()  # its retries of etcd back off, after half a minute to every two minutes
            self.etcd.start()
        if self.api_server.pid is None:
            self.api_server.start()
        self.wait_for_api_server()
        if self.controller_manager.pid is None:
            self.controller_manager.start()
        self.controller_manager.wait_until(self._controllers_work, timeout_seconds=READY_SECONDS)

    def stop(self) -> None:
        """Kill the processes (the API server would drain for a minute) and remove the state folder."""
        for process in reversed(self.processes):
            process.kill()
        kill_all(self.state)  # files of other components
        if self._guard is not None:
            self._guard.release()
        shutil.rmtree(self.state, ignore_errors=True)

    def restart_api_server(self) -> None:
        """Kill the API server with SIGKILL, restart it and wait until it answers."""
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
        """Return a client with the rights of the cluster administrator."""
        return ApiClient(self.server, self._admin, user_agent=USER_AGENT)

    def kubectl(self, *arguments: str, stdin: str = "", as_user: Path | None = None) -> str:
        """Return the output of kubectl. `as_user` is a kubeconfig; by default it is the administrator's."""
        command = [str(self.binaries["kubectl"]), "--cache-dir", str(self.state / "kubectl-cache"), *arguments]
        environment = os.environ | {"KUBECONFIG": str(as_user or self.admin_kubeconfig)}
        done = subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise KubectlFailed(done.stderr.strip())
        return done.stdout

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig for a ServiceAccount, with exactly its RBAC permissions."""
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

    def identity(self, name: str, *, subject: str, addresses: Sequence[str] = ()) -> KeyPair:
        """Create a certificate that the API server accepts for this subject (user and groups in openssl's form)."""
        names = ",".join((f"DNS:{name}", *(f"IP:{address}" for address in addresses)))
        return self._authority.issue(name, subject=subject, alternative_names=names)

    def certificate_kubeconfig(self, name: str) -> Path:
        """Return a kubeconfig for an identity that was created before."""
        path = self.state / f"{name}.kubeconfig"
        return kubeconfig.write(path, kubeconfig.with_certificate(self.server, self._authority.issued(name)))

    def issued(self, name: str) -> KeyPair:
        return self._authority.issued(name)

    @property
    def _admin(self) -> KeyPair:
        return self._authority.issued("admin")

    def _make_identities(self) -> None:
        self._authority.create()
        names = self._site.certificate_names
        self._authority.issue("apiserver", subject="/CN=kube-apiserver", alternative_names=names)
        if self._site.has_nodes:
            self.identity(KUBELET_CLIENT, subject="/O=system:masters/CN=kube-apiserver-kubelet-client")
        admin = self._authority.issue("admin", subject="/O=system:masters/CN=admin", alternative_names="DNS:admin")
        kubeconfig.write(self.admin_kubeconfig, kubeconfig.with_certificate(self.server, admin))

    def _controllers_work(self) -> bool:
        """Return True if the controllers create the default ServiceAccount of a namespace, which pods require."""
        try:
            return self.client().get("/api/v1/namespaces/default/serviceaccounts/default").ok
        except OSError:  # an API server that has just started may drop requests on a busy machine
            return False
