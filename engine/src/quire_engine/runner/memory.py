"""The memory that this process may still allocate: the minimum of the machine's and its cgroups'.

It reads Linux's /proc and /sys, and returns None if they do not exist.
"""

from dataclasses import dataclass
from pathlib import Path

from quire_engine.cpu_quota import cgroup_folders


@dataclass(frozen=True, slots=True, kw_only=True)
class AvailableMemory:
    size: int
    """The bytes that can be allocated without swapping or being killed, according to the system."""
    is_own: bool
    """True if a cgroup limits it, as in a pod: then it belongs to this process and is not shared with the machine."""


def available_memory(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> AvailableMemory | None:
    machine = _machine(proc)
    own = min((left for left in _cgroups(proc, cgroup_root) if left is not None), default=None)
    if own is not None and (machine is None or own <= machine):
        return AvailableMemory(size=max(0, own), is_own=True)
    return None if machine is None else AvailableMemory(size=machine, is_own=False)


def _machine(proc: Path) -> int | None:
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _cgroups(proc: Path, root: Path) -> list[int | None]:
    """Return what is left below the limit of this process's cgroup and every one above it (version 2, then 1)."""
    folders = cgroup_folders(root, proc / "self" / "cgroup")
    version_2 = [_left(path / "memory.max", path / "memory.current", path / "memory.stat") for path in folders]
    memory = root / "memory"
    version_1 = _left(memory / "memory.limit_in_bytes", memory / "memory.usage_in_bytes", memory / "memory.stat")
    return [*version_2, version_1]


def _left(limit_file: Path, used_file: Path, stat_file: Path) -> int | None:
    limit, used = _number(limit_file), _number(used_file)
    if limit is None or used is None:
        return None
    # File pages, including the mapped checkpoint, count as used but are reclaimed under pressure.
    reclaimable = sum(
        int(line.split()[1]) for line in _lines(stat_file) if line.split()[:1] in (["inactive_file"], ["active_file"])
    )
    return limit - max(0, used - reclaimable)


def _number(file: Path) -> int | None:
    lines = _lines(file)
    return int(lines[0]) if lines and lines[0].strip().isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
