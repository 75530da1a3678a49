"""All programs of a cluster with nodes: those built from source and those from Debian packages."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.binaries import Binaries, ensure, present
from quire_cluster.control_plane import PROGRAMS as CONTROL_PLANE
from quire_cluster.debian import debian_folder, debian_folder_here, debian_programs, debian_programs_here
from quire_cluster.fake_nodes import PROGRAMS as FAKE_NODES
from quire_cluster.progress import Progress

BUILT: Final = (*CONTROL_PLANE, *FAKE_NODES, "kubelet", "kube-proxy", "coredns", "pause")
PACKAGED: Final = {
    "containerd": ("containerd", "ctr", "containerd-shim-runc-v2"),
    "docker-registry": ("docker-registry",),
    "prometheus": ("prometheus",),
    "runc": ("runc",),
}
NETWORK_PLUGINS: Final = ("containernetworking-plugins", "usr/lib/cni")


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    built: Binaries
    packaged: Binaries
    network_plugins: Path

    @classmethod
    def ensure(cls, progress: Progress) -> "Programs":
        """Build and download missing programs; report to `progress` if this takes long."""
        built = ensure(BUILT, progress)
        packaged: dict[str, Path] = {}
        for package, programs in PACKAGED.items():
            packaged |= debian_programs(package, programs)
        return cls(built=built, packaged=packaged, network_plugins=debian_folder(*NETWORK_PLUGINS))

    @classmethod
    def here(cls) -> "Programs | None":
        """Return the programs without building or downloading, or None unless all exist."""
        built = present(BUILT)
        packaged: dict[str, Path] = {}
        for package, programs in PACKAGED.items():
            packaged |= debian_programs_here(package, programs) or {}
        plugins = debian_folder_here(*NETWORK_PLUGINS)
        if plugins is None or len(built) < len(set(BUILT)) or len(packaged) < sum(map(len, PACKAGED.values())):
            return None
        return cls(built=built, packaged=packaged, network_plugins=plugins)
