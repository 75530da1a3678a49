"""A node: its own network, mounts and control groups with containerd, the kubelet and kube-proxy in them.

Each of the three can be killed, paused and restarted. `real_cluster` connects nodes to a control plane.
"""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Final

from quire_cluster.control_plane import ControlPlane
from quire_cluster.kubeconfig import write as write_private
from quire_cluster.nodes import cgroups, containerd, kubelet, namespaces, pause, proxy
from quire_cluster.nodes.containerd import outdated
from quire_cluster.nodes.kubelet import KubeletFiles
from quire_cluster.nodes.plan import REGISTRY, NodePlan
from quire_cluster.nodes.teardown import HostProcess, host_process
from quire_cluster.processes import Process
from quire_cluster.programs import Programs
from quire_cluster.shell import run, succeeds

READY_SECONDS: Final = 120.0
REMOVE_SECONDS: Final = 300.0


class Node:
    """A node whose images stay in `store` when the cluster is removed."""

    def __init__(self, plan: NodePlan, *, control_plane: ControlPlane, programs: Programs, store: Path) -> None:
        self.plan = plan
        self.name, self.address = plan.name, plan.address
        self.store = store
        self._control_plane = control_plane
        self._programs = programs
        self._folder = control_plane.state / plan.name
        self.containerd = self._process("containerd", lambda: containerd.command(programs, self._containerd_file))
        self.kubelet = self._process("kubelet", self._kubelet_command)
        self.kube_proxy = self._process(
            "kube-proxy",
            lambda: proxy.command(programs.built["kube-proxy"], plan, control_plane.state / "kube-proxy.kubeconfig"),
        )

    @property
    def processes(self) -> tuple[Process, ...]:
        return (self.containerd, self.kubelet, self.kube_proxy)

    def start_runtime(self) -> None:
        """Start everything that needs no API server. The network must exist."""
        cgroups.create(self.plan)
        if not namespaces.exists(self.plan):
            for process in self.processes:  # of a namespace that is lost
                process.kill()
            namespaces.create(self.plan, self._folder)
        self._write_files()
        if self.containerd.pid is None:
            self.containerd.start()

    def start_kubelet(self) -> None:
        """Start the kubelet; return when containerd has what pods need, not when the node is Ready."""
        self.containerd.wait_until(lambda: succeeds(self._ctr("version")), timeout_seconds=READY_SECONDS)
        if self.kubelet.pid is None:
            if not self._has_tasks():
                self._forget_containers()
            self._import_pause()
            self.kubelet.start()
        if self.kube_proxy.pid is None:
            self.kube_proxy.start()

    def wait_until_ready(self) -> None:
        self.kubelet.wait_until(self.is_ready, timeout_seconds=READY_SECONDS)
        if self.kube_proxy.pid is None:
            self.kube_proxy.wait_until(lambda: False, timeout_seconds=0)

    def is_ready(self) -> bool:
        try:
            answer = self._control_plane.client().get(f"/api/v1/nodes/{self.name}")
        except OSError:
            return False
        conditions = answer.body["status"].get("conditions", ()) if answer.ok else ()
        return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)

    def container_processes(self, container_id: str) -> tuple[HostProcess, ...]:
        """Return the living processes of a container, the first one first; `container_id` is containerd's."""
        for root in cgroups.roots():
            for folder in (root / self.plan.cgroup).rglob(container_id):
                pids = sorted(cgroups.processes(str(folder.relative_to(root))))
                return tuple(process for pid in pids if (process := host_process(pid)).command)
        return ()

    def forget_images_but(self, kept: Collection[str]) -> tuple[str, ...]:
        """Remove images from the cluster's registry with other names than these, and return their names.

        Each version of quire has an image of a gigabyte, and kubelets remove images only when the disk is nearly full.
        """
        names = outdated(run(self._ctr("images", "ls")), registry=REGISTRY, kept=kept)
        if names:
            run(self._ctr("images", "rm", "--sync", *names), seconds=REMOVE_SECONDS)
        return names

    def _process(self, name: str, command: Callable[[], list[str]]) -> Process:
        state = self._control_plane.state
        return Process(f"{self.name}.{name}", lambda: [*namespaces.enter(self.plan), *command()], state)

    @property
    def _containerd_file(self) -> Path:
        return self._folder / "containerd.toml"

    @property
    def _kubelet_file(self) -> Path:
        return self._folder / "kubelet.json"

    def _kubelet_command(self) -> list[str]:
        kubeconfig = self._control_plane.state / f"{self.name}.kubeconfig"
        return kubelet.command(
            self._programs.built["kubelet"], self.plan, config_file=self._kubelet_file, kubeconfig=kubeconfig
        )

    def _write_files(self) -> None:
        self.store.mkdir(parents=True, exist_ok=True, mode=0o711)
        containerd.write(
            self.plan,
            folder=self._folder,
            store=self.store,
            programs=self._programs,
            pause_image=pause.image_name(self._programs.built["pause"]),
        )
        files = KubeletFiles(
            authority=self._control_plane.server.authority,
            serving=self._control_plane.issued(self.name),
            resolv_conf=self._folder / "resolv.conf",
        )
        files.resolv_conf.write_text(kubelet.resolv_conf())
        write_private(self._kubelet_file, kubelet.config(self.plan, files))

    def _ctr(self, *arguments: str) -> list[str]:
        return [*namespaces.enter(self.plan), *containerd.client(self._programs, arguments)]

    def _has_tasks(self) -> bool:
        return bool(run(self._ctr("tasks", "ls", "-q")).split())

    def _forget_containers(self) -> None:
        """Remove containers of a previous cluster, which containerd stores with its images."""
        known = run(self._ctr("containers", "ls", "-q")).split()
        if known:
            run(self._ctr("containers", "rm", *known))

    def _import_pause(self) -> None:
        if pause.image_name(self._programs.built["pause"]) in run(self._ctr("images", "ls", "-q")).split():
            return
        file = self._folder / "pause.tar"
        file.write_bytes(pause.archive(self._programs.built["pause"], architecture=pause.host_architecture()))
        run(self._ctr("images", "import", str(file)))
        file.unlink()
