"""Simulated nodes (kwok): pods are scheduled, become Ready and end, but no containers run.

They are for tests with many pods, GPUs or the real scheduler. They add processes to the state folder of a control
plane; stopping the control plane stops them too. Next to real nodes they are tainted, so that only selected pods are
scheduled there.
"""

from typing import Any, Final

from quire_cluster import components
from quire_cluster.control_plane import READY_SECONDS, ControlPlane
from quire_cluster.processes import Process

PROGRAMS: Final = ("kube-scheduler", "kwok")
# Pod addresses are on loopback, so that a connection never reaches another machine.
POD_ADDRESSES: Final = "127.64.0.0/16"
FAKE: Final = "kwok.x-k8s.io/node"
# Taint and label of simulated nodes next to real ones, for pods to tolerate and select.
TAINT: Final = "quire.dev/fake"


class FakeNodes:
    """A scheduler and the requested number of nodes."""

    def __init__(self, control_plane: ControlPlane, *, is_tainted: bool = False) -> None:
        self._control_plane = control_plane
        self._is_tainted = is_tainted
        self._started: list[Process] = []
        binaries, kubeconfig = control_plane.binaries, control_plane.admin_kubeconfig
        self._node_names: list[str] = []
        self.scheduler = Process(
            "kube-scheduler", lambda: components.scheduler(binaries, kubeconfig), control_plane.state
        )
        # With the default limits, many pods delay the heartbeats of nodes, and the pods are evicted.
        self.kwok = Process(
            "kwok",
            lambda: [
                str(binaries["kwok"]),
                f"--kubeconfig={kubeconfig}",
                f"--manage-nodes-with-annotation-selector={FAKE}=fake",
                "--node-lease-duration-seconds=120",
                f"--cidr={POD_ADDRESSES}",
                "--server-address=127.0.0.1:0",
            ],
            control_plane.state,
        )

    def start(self, count: int, *, gpus: int = 8) -> None:
        """Start `count` nodes with this number of GPUs each; return when they are Ready."""
        for process in (self.scheduler, self.kwok):
            if process.pid is None:
                process.start()
                self._started.append(process)
        for number in range(count):
            self.add(f"fake-{number}", gpus=gpus)
        self.kwok.wait_until(lambda: self._ready() >= count, timeout_seconds=READY_SECONDS)

    def add(self, name: str, *, gpus: int, labels: dict[str, str] | None = None) -> None:
        """Add a node, which soon becomes Ready. Pods select it by `kubernetes.io/hostname`."""
        node = manifest(name, gpus=gpus, labels=labels or {}, is_tainted=self._is_tainted)
        answer = self._control_plane.client().post("/api/v1/nodes", node)
        assert answer.ok, answer.body
        self._node_names.append(name)

    def stop(self) -> None:
        """Stop the processes and delete the nodes; the controllers collect their pods."""
        for process in reversed(self._started):
            process.kill()
        self._started.clear()
        if self._node_names:
            self._control_plane.kubectl("delete", "nodes", *self._node_names, "--ignore-not-found", "--wait=false")
        self._node_names.clear()

    def _ready(self) -> int:
        nodes = self._control_plane.client().get("/api/v1/nodes").body["items"]
        return sum(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in nodes
            if node["metadata"]["name"] in self._node_names
            for condition in node["status"].get("conditions", ())
        )


def manifest(name: str, *, gpus: int, labels: dict[str, str], is_tainted: bool) -> dict[str, Any]:
    """Return the manifest of a node that kwok manages."""
    resources = {"cpu": "64", "memory": "512Gi", "pods": "1000", "nvidia.com/gpu": str(gpus)}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {FAKE: "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
            | ({TAINT: "true"} if is_tainted else {})
            | labels,
        },
        "spec": {"taints": [{"key": TAINT, "value": "true", "effect": "NoSchedule"}] if is_tainted else []},
        "status": {"capacity": resources, "allocatable": resources},
    }
