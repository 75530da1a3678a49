"""A lock on each version of a cached model: an engine holds it while it runs, and only unused versions are removed.

Used by ``model_cache``, which removes old versions if a volume is full, and by ``quire-engine``. The lock is a file
next to the version's folder, because engines mount the volume read-only; flock releases it however a process ends.
Versions without a lock file were downloaded by an older quire, whose engines hold no lock: they are never removed.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".lock"
_IDLE_SECONDS = 3600.0
"""Between a download, or its check, and the start of the engine there is no lock; an image may have to be pulled."""
_LEVELS = 8
_MOUNTS = Path("/proc/self/mountinfo")
# File systems whose flock works for all processes that mount them; those of one node are mounted by one node only.
_ONE_NODE = frozenset({"ext4", "ext3", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "overlay"})
_SHARED = frozenset({"nfs", "nfs4", "ceph"})


def hold(model: Path) -> int | None:
    """Keep the version that contains this folder until the process ends; return the open file, None without a lock."""
    folder = model.resolve()
    for version in (folder, *folder.parents[:_LEVELS]):
        if not version.name:
            break
        try:
            file = os.open(lock_file(version), os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            return None
        return file
    return None


def lock_file(version: Path) -> Path:
    """Return the lock file of a version's folder."""
    return version.with_name(f"{version.name}{SUFFIX}")


@contextmanager
def in_use(version: Path) -> Iterator[bool]:
    """Keep the version within the block, and for an hour afterwards. Yield False if it is absent or being removed."""
    try:
        file = os.open(lock_file(version), os.O_RDONLY)
    except OSError:
        yield version.is_dir()
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # Without locks, no version is removed either.
        with suppress(OSError):
            os.utime(lock_file(version))
        yield version.is_dir()
    finally:
        os.close(file)


def remove_unused(folder: Path, *, keep: Path) -> bool:
    """Remove the version in ``folder`` that has been unused for longest; return False if none can be removed."""
    if not locks_reach_everybody(folder):
        return False
    candidates = [lock for lock in folder.glob(f"*{SUFFIX}") if lock != lock_file(keep)]
    return any(_remove(lock) for lock in sorted(candidates, key=_used_at))


def _remove(lock: Path) -> bool:
    version = lock.with_name(lock.name.removesuffix(SUFFIX))
    if not time.time() - _IDLE_SECONDS - _used_at(lock) >= 0 or not version.is_dir():
        return False
    try:
        file = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Rename first, because an existing version must be complete.
        removed = version.with_name(f".{version.name}.removed")
        version.rename(removed)
        lock.unlink(missing_ok=True)
        shutil.rmtree(removed, ignore_errors=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _used_at(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except OSError:
        return float("inf")


def locks_reach_everybody(folder: Path, mounts: Path = _MOUNTS) -> bool:
    """Return whether all processes that can mount the volume, on any node, see a lock here."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return False
    resolved, best = folder.resolve(), (-1, "", "")
    for line in lines:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 6 or len(kind) < 3:
            continue
        point = fields[4].replace("\\040", " ")
        if resolved.is_relative_to(point) and len(point) >= best[0]:
            best = (len(point), kind[0], f"{fields[5]},{kind[2]}")
    _, file_system, options = best
    if file_system in _ONE_NODE:
        return True
    words = options.split(",")
    has_local_locks = "nolock" in words or any(w.startswith("local_lock=") and w != "local_lock=none" for w in words)
    return file_system in _SHARED and not has_local_locks
