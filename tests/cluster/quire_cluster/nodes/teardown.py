"""Removal of nodes: every process on a node, then all changes to the host.

It uses only the fixed names, so it can also remove a cluster whose state folder is gone.
"""

import contextlib
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quire_cluster.errors import ComponentFailed
from quire_cluster.guard import POLL_SECONDS, birth_of
from quire_cluster.nodes import cgroups, machine, namespaces, network
from quire_cluster.nodes.plan import NodePlan

END_SECONDS: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostProcess:
    """A process of a node as the host sees it."""

    pid: int
    command: str


def host_process(pid: int) -> HostProcess:
    """Return the process; its command is empty if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:  # it has ended meanwhile
        words = []
    return HostProcess(pid=pid, command=" ".join(word.decode(errors="replace") for word in words))


def end_processes(node: NodePlan) -> None:
    """Kill all processes and wait: containers by control group, shims (which outlive containerd) by mount."""
    deadline = time.monotonic() + END_SECONDS
    while left := {pid for pid in _processes(node) if birth_of(pid) is not None}:
        if time.monotonic() > deadline:
            named = ", ".join(f"{pid} ({host_process(pid).command[:60]})" for pid in sorted(left))
            raise ComponentFailed(f"processes of {node.name} do not end: {named}")
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_SECONDS)


def restore_host(nodes: Sequence[NodePlan]) -> None:
    """Restore namespaces, network, control groups and kernel settings of the host."""
    for node in nodes:
        end_processes(node)
        namespaces.remove(node)
    network.remove(nodes)
    cgroups.remove(nodes)
    namespaces.remove_pins()
    recorded = machine.read()
    if recorded is not None:
        recorded.restore()


def _processes(node: NodePlan) -> Iterator[int]:
    yield from cgroups.processes(node.cgroup)
    inode = namespaces.inode(node)
    for folder in Path("/proc").iterdir() if inode is not None else ():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and (folder / "ns" / "mnt").stat().st_ino == inode:
                yield int(folder.name)
