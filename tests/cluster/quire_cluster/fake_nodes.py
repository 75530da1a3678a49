"""Nodes that only pretend, by kwok: pods are scheduled, become Ready and end, and nothing runs.

For what needs many pods, or GPUs, or a scheduler with an opinion. Adds processes to a control plane's state folder;
stopping the control plane stops them too. Beside real nodes they are tainted, so that only pods meant for them come.
"""

from typing import Any, Final

from quire_cluster import components
from quire_cluster.control_plane import READY_SECONDS, ControlPlane
from quire_cluster.processes import Process

PROGRAMS: Final = ("kube-scheduler", "kwok")
# An address for each pod: on loopback, so that whoever tries one reaches nobody else's machine.
POD_ADDRESSES: Final = "127.64.0.0/16"
FAKE: Final = "kwok.x-k8s.io/node"
# On nodes that are beside real ones: a taint for pods to tolerate, and a label for them to choose.
TAINT: Final = "quire.dev/fake"


class FakeNodes:
    """A scheduler, and as many nodes as asked for."""

    def __init__(self, control_plane: ControlPlane, *, is_tainted: bool = False) -> None:
        self._control_plane = control_plane
        self._is_tainted = is_tainted
        self._started: list[Process] = []
        binaries, kubeconfig = control_plane.binaries, control_plane.admin_kubeconfig
        self._node_names: list[str] = []
        self.scheduler = Process(
            "kube-scheduler", lambda: components.scheduler(binaries, kubeconfig), control_plane.state
        )
        # With the default limits heartbeats of nodes starve under many pods, and those are evicted.
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
        """Returns when `count` nodes with so many GPUs each are Ready."""
        for process in (self.scheduler, self.kwok):
            if process.pid is None:
                process.start()
                self._started.append(process)
        for number in range(count):
            self._post(f"fake-{number}", gpus=gpus)
        self.kwok.wait_until(lambda: self._ready() >= count, timeout_seconds=READY_SECONDS)

    def add(self, name: str, *, gpus: int, labels: dict[str, str] | None = None) -> None:
        """One more; it is Ready soon. Pods choose it by `kubernetes.io/hostname`."""
        self._post(name, gpus=gpus, labels=labels)

    def stop(self) -> None:
        """The processes that it started and its nodes; pods on them are collected by the controllers."""
        for process in reversed(self._started):
            process.kill()
        self._started.clear()
        if self._node_names:
            self._control_plane.kubectl("delete", "nodes", *self._node_names, "--ignore-not-found", "--wait=false")
        self._node_names.clear()

    def _post(self, name: str, *, gpus: int, labels: dict[str, str] | None = None) -> None:
        node = manifest(name, gpus=gpus, labels=labels or {}, is_tainted=self._is_tainted)
        answer = self._control_plane.client().post("/api/v1/nodes", node)
        assert answer.ok, answer.body
        self._node_names.append(name)

    def _ready(self) -> int:
        nodes = self._control_plane.client().get("/api/v1/nodes").body["items"]
        return sum(
            condition["type"] == "Ready" and condition["status"] == "True"
            for node in nodes
            if node["metadata"]["name"] in self._node_names
            for condition in node["status"].get("conditions", ())
        )


def manifest(name: str, *, gpus: int, labels: dict[str, str], is_tainted: bool) -> dict[str, Any]:
    """One that kwok takes for its own."""
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
