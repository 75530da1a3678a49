"""A mount namespace for each node: containerd, its shims and the kubelet share mounts that the host does not see.

Thus each node has its own compiled-in paths (/var/lib/kubelet/device-plugins, /var/log/containers, /run/containerd),
and all mounts disappear with the last process of the node.
"""

from pathlib import Path
from typing import Final

from quire_cluster.nodes.plan import RUN, NodePlan
from quire_cluster.shell import run, succeeds

PINS: Final = RUN / "namespaces"
# Folders that each node has for itself. Missing ones are created on the host while the cluster exists.
OVER: Final = ("/var/lib/kubelet", "/var/lib/cni", "/var/log")


def enter(node: NodePlan) -> list[str]:
    """Return the prefix of a command that runs on the node. It replaces nsenter: same process, same id."""
    return ["nsenter", f"--net={node.network_namespace_file}", f"--mount={node.mount_namespace_file}", "--"]


def exists(node: NodePlan) -> bool:
    return node.mount_namespace_file.exists() and succeeds([*enter(node), "true"])


def setup_script(folder: Path) -> str:
    """Return the script for a new namespace. Mounts are shared, so that container namespaces receive later mounts."""
    binds = [f"mount --bind {folder / Path(path).name} {path}" for path in OVER]
    return " && ".join(["mount --make-rshared /", *binds, "mount -t tmpfs -o mode=755 tmpfs /run", "mkdir /run/netns"])


def create(node: NodePlan, folder: Path) -> None:
    """Create the namespace; the node writes into OVER below `folder`."""
    for path in OVER:
        (folder / Path(path).name).mkdir(parents=True, exist_ok=True)
    _pinnable()
    node.mount_namespace_file.touch()
    unshare = ["unshare", f"--mount={node.mount_namespace_file}", "--propagation=private"]
    run([*unshare, "--", "sh", "-c", setup_script(folder)])


def remove(node: NodePlan) -> None:
    """Remove the namespace when it has no processes."""
    if node.mount_namespace_file.exists():
        if _is_mounted(node.mount_namespace_file):
            run(["umount", str(node.mount_namespace_file)])
        node.mount_namespace_file.unlink()


def remove_pins() -> None:
    if PINS.is_dir():
        succeeds(["umount", str(PINS)])  # it fails if an interrupted start had not mounted it yet
        PINS.rmdir()


def inode(node: NodePlan) -> int | None:
    """Return the inode of /proc/PID/ns/mnt of its processes, or None without a namespace."""
    return node.mount_namespace_file.stat().st_ino if _is_mounted(node.mount_namespace_file) else None


def _pinnable() -> None:
    """Prepare a folder with a private mount, because a namespace can be pinned only to a file in one."""
    PINS.mkdir(parents=True, exist_ok=True)
    if not _is_mounted(PINS):
        run(["mount", "-t", "tmpfs", "-o", "mode=700", "tmpfs", str(PINS)])
        run(["mount", "--make-private", str(PINS)])


def _is_mounted(path: Path) -> bool:
    """Return True if a mount is visible; the mount table also lists covered ones."""
    try:
        return path.stat().st_dev != path.parent.stat().st_dev
    except FileNotFoundError:
        return False
