"""A complete Kubernetes on one machine: control plane, two nodes that run containers, DNS, registry, Prometheus.

It combines the other modules of this package. Every process can be killed, paused and restarted; `start` starts all
processes that do not run; `stop` restores the machine, except for images in the cache.
"""

import json
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from socket import SOCK_DGRAM
from typing import Any, Final

from quire_cluster import dns, pod_discovery, prometheus, registry
from quire_cluster.binaries import cache_folder
from quire_cluster.components import Site
from quire_cluster.control_plane import READY_SECONDS, ControlPlane
from quire_cluster.errors import ComponentFailed
from quire_cluster.fake_nodes import FakeNodes
from quire_cluster.guard import kill_all
from quire_cluster.nodes import kubelet, machine, network, proxy, requirements, teardown
from quire_cluster.nodes.node import Node
from quire_cluster.nodes.plan import (
    API_SERVER_PORT,
    DNS_PORT,
    HOST_ADDRESS,
    NODES,
    PROMETHEUS_PORT,
    PROMETHEUS_URL,
    REGISTRY,
    REGISTRY_PORT,
)
from quire_cluster.nodes.teardown import HostProcess
from quire_cluster.processes import Process
from quire_cluster.programs import Programs
from quire_cluster.progress import Progress

SITE: Final = Site(address=HOST_ADDRESS, has_nodes=True)
MARK: Final = "has-nodes"
PROXY: Final = "kube-proxy"
OBSERVER: Final = "observer"  # CoreDNS and Prometheus: may look at everything but secrets
OBSERVERS: Final = "quire:observers"
OBSERVERS_RIGHTS: Final[dict[str, Any]] = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRoleBinding",
    "metadata": {"name": "quire-observers"},
    "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"},
    "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": OBSERVERS}],
}


class RealCluster:
    """A cluster: its parts by name, and methods to observe and disturb them.

    `control_plane` contains etcd, the API server and the controller manager; `nodes` are keyed by name.
    """

    prometheus_url: Final = PROMETHEUS_URL
    registry_address: Final = REGISTRY

    def __init__(self, control_plane: ControlPlane, programs: Programs) -> None:
        state, built, packaged = control_plane.state, programs.built, programs.packaged
        self.state = state
        self.control_plane = control_plane
        self.admin_kubeconfig = control_plane.admin_kubeconfig
        self.fake_nodes = FakeNodes(control_plane, is_tainted=True)
        self.scheduler = self.fake_nodes.scheduler
        self.dns = Process("coredns", lambda: dns.command(built["coredns"], state / "Corefile"), state)
        self.registry = Process(
            "docker-registry", lambda: registry.command(packaged["docker-registry"], state / "registry.json"), state
        )
        self.pod_discovery = Process("pod-discovery", self._pod_discovery_command, state)
        self.prometheus = Process(
            "prometheus",
            lambda: prometheus.command(packaged["prometheus"], state / "prometheus.json", state / "prometheus"),
            state,
        )
        self.nodes: Mapping[str, Node] = {
            plan.name: Node(plan, control_plane=control_plane, programs=programs, store=store() / plan.name)
            for plan in NODES
        }

    @classmethod
    def create(cls, state: Path, programs: Programs) -> "RealCluster":
        """Create a cluster without starting it."""
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        (state / MARK).touch()
        return cls(ControlPlane.create(state, programs.built, site=SITE, api_server_port=API_SERVER_PORT), programs)

    @classmethod
    def load(cls, state: Path, programs: Programs | None = None) -> "RealCluster | None":
        """Return the cluster that an earlier run created in this folder, or None if it is missing or incomplete."""
        if not (state / MARK).exists():
            return None
        programs = programs or Programs.here() or Programs.ensure(Progress(sys.stderr))
        control_plane = ControlPlane.load(state, programs.built, site=SITE)
        return None if control_plane is None else cls(control_plane, programs)

    @property
    def processes(self) -> tuple[Process, ...]:
        """Return all processes that should run."""
        of_nodes = (process for node in self.nodes.values() for process in node.processes)
        servers = (self.scheduler, self.dns, self.registry, self.pod_discovery, self.prometheus)
        return (*self.control_plane.processes, *servers, *of_nodes)

    def start(self, progress: Progress) -> None:
        """Start all processes that do not run; return when both nodes are Ready and everything answers."""
        began = time.monotonic()
        requirements.check(self.state, store(), progress)
        machine.claim(self.state)
        network.ensure(NODES)
        self._issue_identities()
        for node in self.nodes.values():
            node.start_runtime()
        progress.say("==> starting the control plane")
        self._require_ports()
        self.control_plane.start()
        self.control_plane.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(OBSERVERS_RIGHTS))
        progress.say("==> starting DNS, the registry, Prometheus and the nodes")
        self._start_servers()
        for node in self.nodes.values():
            node.start_kubelet()
        self._wait_for_servers()
        for node in self.nodes.values():
            node.wait_until_ready()
        progress.say(f"==> up after {time.monotonic() - began:.0f} s")

    def pod_processes(self, namespace: str, pod: str, container: str) -> tuple[HostProcess, ...]:
        """Return the processes of a container as the host sees them, or an empty list."""
        answer = self.control_plane.client().get(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        if not answer.ok:
            raise ComponentFailed(f"pod {namespace}/{pod}: {answer.body['message']}")
        statuses = answer.body["status"].get("containerStatuses", ())
        ids = {status["name"]: status.get("containerID", "") for status in statuses}
        if container not in ids:
            raise ComponentFailed(
                f"pod {namespace}/{pod} has no container {container}; it has {', '.join(ids) or 'none yet'}"
            )
        _, _, identity = ids[container].partition("://")
        node = self.nodes.get(answer.body["spec"].get("nodeName", ""))
        return () if node is None or not identity else node.container_processes(identity)

    @property
    def _scraped_pods(self) -> Path:
        return self.state / "scraped-pods.json"

    def _pod_discovery_command(self) -> list[str]:
        pair = self.control_plane.issued(OBSERVER)
        return pod_discovery.command(self.control_plane.server, pair, self._scraped_pods)

    def _issue_identities(self) -> None:
        """Issue the identities that an interrupted `start` did not reach."""
        wanted = {
            PROXY: (proxy.SUBJECT, ()),
            OBSERVER: (f"/O={OBSERVERS}/CN=quire:{OBSERVER}", ()),
        } | {node.name: (kubelet.subject(node.plan), (node.address,)) for node in self.nodes.values()}
        for name, (subject, addresses) in wanted.items():
            if not (self.state / f"{name}.kubeconfig").exists():
                self.control_plane.identity(name, subject=subject, addresses=addresses)
                self.control_plane.certificate_kubeconfig(name)

    def _require_ports(self) -> None:
        for process, port in (
            (self.control_plane.api_server, API_SERVER_PORT),
            (self.dns, DNS_PORT),
            (self.dns, dns.READY_PORT),
            (self.registry, REGISTRY_PORT),
            (self.prometheus, PROMETHEUS_PORT),
        ):
            if process.pid is None:
                requirements.require_port(port, process.name)
        if self.dns.pid is None:
            requirements.require_port(DNS_PORT, self.dns.name, SOCK_DGRAM)

    def _start_servers(self) -> None:
        observer = self.state / f"{OBSERVER}.kubeconfig"
        (self.state / "Corefile").write_text(dns.config(observer))
        if self.registry.pid is None:
            registry.make_storage(registry_storage())
        (self.state / "registry.json").write_text(registry.config(registry_storage()))
        (self.state / "prometheus.json").write_text(prometheus.config(self._scraped_pods))
        for process in (self.scheduler, self.dns, self.registry, self.pod_discovery, self.prometheus):
            if process.pid is None:
                process.start()

    def _wait_for_servers(self) -> None:
        for process, url in (
            (self.dns, dns.READY_URL),
            (self.registry, registry.READY_URL),
            (self.prometheus, prometheus.READY_URL),
        ):
            process.wait_until(partial(_answers, url), timeout_seconds=READY_SECONDS)


def has_nodes(state: Path) -> bool:
    """Return True if the complete or incomplete cluster in this folder has nodes."""
    recorded = machine.read()
    return (state / MARK).exists() or (recorded is not None and recorded.state == str(state))


def stop(state: Path, *, purge: bool = False) -> None:
    """Stop and remove all remains of the cluster except its programs, and its images unless `purge` is set."""
    kill_all(state)
    teardown.restore_host(NODES)
    shutil.rmtree(state, ignore_errors=True)
    if purge:
        for folder in (store(), registry_storage()):
            shutil.rmtree(folder, ignore_errors=True)


def default_state() -> Path:
    """Return the folder that `make cluster-up` uses."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser().absolute() / "quire" / "cluster"


def store() -> Path:
    """Return the folder of the nodes' images."""
    return cache_folder() / "nodes"


def registry_storage() -> Path:
    return cache_folder() / "registry"


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
