"""The container runtime of a node: containerd with runc, the network plugin, and its images.

Content and snapshots are in the cache for later clusters. Sockets and running state are below the node own /run, which
disappears with the node.
"""

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from quire_cluster.nodes.plan import REGISTRY, NodePlan
from quire_cluster.programs import Programs

SOCKET: Final = "/run/containerd/containerd.sock"
NAMESPACE: Final = "k8s.io"
POD_BRIDGE: Final = "cni0"


def config(*, folder: Path, store: Path, programs: Programs, pause_image: str) -> str:
    """Return the configuration of containerd. `folder` contains the node's other files, `store` the images."""
    return f"""\
version = 2
root = "{store}"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.snapshotter.v1.devmapper"]

[grpc]
  address = "{SOCKET}"

[plugins."io.containerd.internal.v1.opt"]
  path = "{folder / "opt"}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{pause_image}"
  restrict_oom_score_adj = true
  max_concurrent_downloads = 6

  [plugins."io.containerd.grpc.v1.cri".containerd]
    # Layers are kept unpacked only: two nodes hold every image.
    discard_unpacked_layers = true

  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"

    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{programs.packaged["runc"]}"
      SystemdCgroup = false

  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "{programs.network_plugins}"
    conf_dir = "{folder / "cni.d"}"

  [plugins."io.containerd.grpc.v1.cri".registry]
    config_path = "{folder / "registries"}"
"""


def network_config(node: NodePlan) -> str:
    """Return the network configuration: the links of pods end at a bridge in the node's namespace."""
    bridge = {
        "type": "bridge",
        "bridge": POD_BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": node.pod_subnet, "gateway": node.pod_gateway}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    ports = {"type": "portmap", "capabilities": {"portMappings": True}}
    return json.dumps({"cniVersion": "1.0.0", "name": "quire", "plugins": [bridge, ports]}, indent=2) + "\n"


def registry_config() -> str:
    """Return the configuration of the local registry, which uses plain HTTP."""
    return f'server = "http://{REGISTRY}"\n\n[host."http://{REGISTRY}"]\n  capabilities = ["pull", "resolve"]\n'


def write(node: NodePlan, *, folder: Path, store: Path, programs: Programs, pause_image: str) -> Path:
    """Write all three files and return the path of containerd's own."""
    hosts = folder / "registries" / REGISTRY / "hosts.toml"
    network = folder / "cni.d" / "10-quire.conflist"
    for file, text in ((hosts, registry_config()), (network, network_config(node))):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists() or file.read_text() != text:  # containerd watches the network's, and may read half of it
            file.write_text(text)
    path = folder / "containerd.toml"
    path.write_text(config(folder=folder, store=store, programs=programs, pause_image=pause_image))
    return path


def command(programs: Programs, file: Path) -> list[str]:
    folders = (programs.packaged[program].parent for program in ("containerd-shim-runc-v2", "runc"))
    path = ":".join(map(str, (*folders, "/usr/local/sbin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")))
    return ["env", f"PATH={path}", str(programs.packaged["containerd"]), "--config", str(file)]


def client(programs: Programs, arguments: Sequence[str]) -> list[str]:
    """Return a `ctr` command in the kubelet's namespace, to be run on the node."""
    return [str(programs.packaged["ctr"]), "--address", SOCKET, "--namespace", NAMESPACE, *arguments]


def outdated(listing: str, *, registry: str, kept: Collection[str]) -> tuple[str, ...]:
    """Return all names of images from `registry` except the `kept` ones, from the output of `ctr images ls`."""
    rows = [line.split() for line in listing.splitlines()[1:]]
    digests = {row[0]: row[2] for row in rows if len(row) >= 3}
    needed = {digest for name, digest in digests.items() if name in kept or not _is_ours(name, registry)}
    # A name by digest does not contain the registry.
    from_here = {digest for name, digest in digests.items() if name.startswith(f"{registry}/")}
    return tuple(name for name, digest in digests.items() if digest in from_here - needed)


def _is_ours(name: str, registry: str) -> bool:
    return name.startswith((f"{registry}/", "sha256:"))
