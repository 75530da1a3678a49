"""A mount namespace for each node: containerd, its shims and the kubelet see one set of mounts, the host none of them.

So two nodes have what is compiled into these programs (/var/lib/kubelet/device-plugins, /var/log/containers,
/run/containerd) once each; and whatever was mounted is gone when the last process of the node is.
"""

from pathlib import Path
from typing import Final

from quire_cluster.nodes.plan import RUN, NodePlan
from quire_cluster.nodes.shell import run, succeeds

PINS: Final = RUN / "namespaces"
# Where a node's own folders go; those that the host does not have are made for as long as the cluster lives.
OVER: Final = ("/var/lib/kubelet", "/var/lib/cni", "/var/log")


def enter(node: NodePlan) -> list[str]:
    """Put before a command that runs on the node. It replaces nsenter: same process, same id."""
    return ["nsenter", f"--net={node.network_namespace_file}", f"--mount={node.mount_namespace_file}", "--"]


def exists(node: NodePlan) -> bool:
    return node.mount_namespace_file.exists() and succeeds([*enter(node), "true"])


def setup_script(folder: Path) -> str:
    """Run inside a new namespace. Shared, so that containers' namespaces are fed what is mounted later."""
    binds = [f"mount --bind {folder / Path(path).name} {path}" for path in OVER]
    return " && ".join(["mount --make-rshared /", *binds, "mount -t tmpfs -o mode=755 tmpfs /run", "mkdir /run/netns"])


def create(node: NodePlan, folder: Path) -> None:
    """`folder` takes what the node writes into OVER."""
    for path in OVER:
        (folder / Path(path).name).mkdir(parents=True, exist_ok=True)
    _pinnable()
    node.mount_namespace_file.touch()
    unshare = ["unshare", f"--mount={node.mount_namespace_file}", "--propagation=private"]
    run([*unshare, "--", "sh", "-c", setup_script(folder)])


def remove(node: NodePlan) -> None:
    """Once no process is left in it."""
    if node.mount_namespace_file.exists():
        if _is_mounted(node.mount_namespace_file):
            run(["umount", str(node.mount_namespace_file)])
        node.mount_namespace_file.unlink()


def remove_pins() -> None:
    if PINS.is_dir():
        succeeds(["umount", str(PINS)])  # it fails where an interrupted start had not mounted it yet
        PINS.rmdir()


def inode(node: NodePlan) -> int | None:
    """What /proc/PID/ns/mnt of its processes says; None without one."""
    return node.mount_namespace_file.stat().st_ino if _is_mounted(node.mount_namespace_file) else None


def _pinnable() -> None:
    """A namespace can be pinned only to a file whose mount nobody shares."""
    PINS.mkdir(parents=True, exist_ok=True)
    if not _is_mounted(PINS):
        run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(PINS)])
        run(["mount", "--make-private", str(PINS)])


def _is_mounted(path: Path) -> bool:
    """By looking, not by the table of mounts, which lists covered ones too."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except FileNotFoundError:
        return False
