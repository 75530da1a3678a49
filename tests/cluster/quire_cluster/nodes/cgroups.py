"""The control groups of each node: /quire/node-1 and below contain its pods, in every hierarchy.

Two kubelets with the same root would remove each other's pods. Both versions of control groups are supported.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from quire_cluster.errors import ComponentFailed, MachineUnfit
from quire_cluster.nodes.plan import CGROUP, NodePlan

MOUNTS: Final = Path("/proc/self/mountinfo")
NEEDED: Final = frozenset({"cpu", "cpuset", "memory", "pids"})
REMOVAL_SECONDS: Final = 10.0
PROCESSES: Final = 12
"""The processes outside with which all pods together share the processors equally. A new group counts as one process,
so that pods on a machine that also compiles or tests would hardly start."""


def hierarchies(mountinfo: str) -> dict[str, Path]:
    """Return the mount point of each controller of version 1, and of version 2 under the name ``unified``."""
    found: dict[str, Path] = {}
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        mount_point, (kind, _, options) = Path(left.split()[4]), right.split()
        if kind == "cgroup2":
            found.setdefault("unified", mount_point)
        elif kind == "cgroup":
            named = [option for option in options.split(",") if option in NEEDED or option.startswith("name=")]
            found |= {name: mount_point for name in named or (mount_point.name,)}
    return found


def lacking(found: dict[str, Path], unified_controllers: str) -> frozenset[str]:
    """Return the controllers that a kubelet needs and no hierarchy provides."""
    return NEEDED - found.keys() - set(unified_controllers.split())


def roots() -> tuple[Path, ...]:
    """Return the roots in all hierarchies. Raise MachineUnfit if a kubelet would not start on them."""
    found = hierarchies(MOUNTS.read_text())
    unified = found.get("unified", Path("/no")) / "cgroup.controllers"
    missing = lacking(found, unified.read_text() if unified.exists() else "")
    if missing:
        raise MachineUnfit(
            f"the control groups mounted here lack {', '.join(sorted(missing))}, which a kubelet needs: "
            "mount them below /sys/fs/cgroup (in a container, start it with --privileged --cgroupns=host)"
        )
    return tuple(dict.fromkeys(found.values()))


def create(node: NodePlan) -> None:
    for root in roots():
        folder = root
        for part in Path(node.cgroup).parts:
            _delegate(folder)
            folder = folder / part
            folder.mkdir(exist_ok=True)
            _inherit_cpuset(folder)
        weigh(root / CGROUP)


def weigh(folder: Path) -> None:
    """Give a group the processor time of several processes, in the hierarchy that has processors."""
    for name, of_one_process in (("cpu.shares", 1024), ("cpu.weight", 100)):
        file = folder / name
        if file.exists():
            file.write_text(str(PROCESSES * of_one_process))


def processes(cgroup: str) -> frozenset[int]:
    """Return all processes in the group and below it."""
    return frozenset(pid for root in roots() for folder in _tree(root / cgroup) for pid in _listed(folder))


def remove(nodes: Sequence[NodePlan]) -> None:
    """Remove the groups when their processes are gone; the kernel may release the last one with a delay."""
    deadline = time.monotonic() + REMOVAL_SECONDS
    paths = [root / cgroup for cgroup in (*(node.cgroup for node in nodes), CGROUP) for root in roots()]
    for path in paths:
        while not _removed(path):
            if time.monotonic() > deadline:
                raise ComponentFailed(f"{path} cannot be removed: processes are left in it or below")
            time.sleep(0.05)


def _delegate(folder: Path) -> None:
    """Delegate the controllers of this group to its children (version 2)."""
    control, controllers = folder / "cgroup.subtree_control", folder / "cgroup.controllers"
    if control.exists():
        wanted = NEEDED & set(controllers.read_text().split())
        if wanted:
            control.write_text(" ".join(f"+{name}" for name in sorted(wanted)))


def _inherit_cpuset(folder: Path) -> None:
    """Copy the processors of the parent, because a new group has none at first (version 1)."""
    for name in ("cpuset.cpus", "cpuset.mems"):
        file = folder / name
        if file.exists() and not (folder / "cgroup.controllers").exists() and not file.read_text().strip():
            file.write_text((folder.parent / name).read_text())


def _tree(root: Path) -> Iterator[Path]:
    """Return children before parents, the order in which they can be removed."""
    for folder, _, _ in os.walk(root, topdown=False):
        yield Path(folder)


def _listed(folder: Path) -> Iterator[int]:
    try:
        yield from map(int, (folder / "cgroup.procs").read_text().split())
    except OSError:  # removed since it was seen
        return


def _removed(path: Path) -> bool:
    try:
        for folder in _tree(path):
            folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return not path.exists()
