"""The number of CPUs that this process may use, by its affinity and the quotas of its cgroup and its ancestors."""

import math
import os
from pathlib import Path


def usable_cpus(cgroup_root: Path = Path("/sys/fs/cgroup"), own_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    folders = cgroup_folders(cgroup_root, own_cgroup)
    quotas = [quota for folder in folders if (quota := _quota_v2(folder / "cpu.max")) is not None]
    if (quota_v1 := _quota_v1(cgroup_root / "cpu")) is not None:
        quotas.append(quota_v1)
    return max(1, min(allowed, math.floor(min(quotas, default=float(allowed)))))


def cgroup_folders(root: Path, own_cgroup: Path) -> list[Path]:
    """Return this process's cgroup and its ancestors; in a container with a cgroup namespace this is only the root.

    The folders are those of version 2.
    """
    try:
        lines = own_cgroup.read_text().splitlines()
    except OSError:
        return [root]
    own = next((line.removeprefix("0::") for line in lines if line.startswith("0::")), "/")
    folder = root / own.lstrip("/")
    return [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]


def _quota_v2(file: Path) -> float | None:
    try:
        quota, period = file.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError):
        return None
    return quota / period if quota > 0 and period > 0 else None
