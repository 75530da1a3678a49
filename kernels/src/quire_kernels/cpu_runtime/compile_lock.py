"""The lock for the compilation of one worker: one process compiles it, and the others wait and then read the cache.

The ranks of a group, and the replicas on a machine, need the same workers at the same time when the cache is empty.
The kernel releases a flock when its holder ends, however it ends. Where no lock can be had (the folder has become
read-only, or its file system has no locks), each process compiles for itself, which leaves the same files.
"""

import contextlib
import fcntl
import logging
import multiprocessing
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_FIRST_REPORT_SECONDS, _REPORT_SECONDS = 1.0, 30.0
"""The seconds of waiting, for all workers together, after which it is logged for the first time and again."""
_LONGEST_WAIT_SECONDS = 300.0
"""A holder that needs longer for one worker is probably stopped."""


class CompileLocks:
    """The locks of all workers in this process, with the time that it has waited for other processes."""

    def __init__(
        self,
        *,
        first_report_seconds: float = _FIRST_REPORT_SECONDS,
        longest_wait_seconds: float = _LONGEST_WAIT_SECONDS,
    ) -> None:
        self._waited = 0.0
        self._report_at = first_report_seconds
        self._longest_wait = longest_wait_seconds

    @contextlib.contextmanager
    def hold(self, path: Path) -> Iterator[None]:
        """Hold the lock of this file within the block, or no lock if none can be had."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(path.open("ab+", buffering=0))
                if self._acquire(file):
                    file.truncate(0)
                    file.write(_own_name().encode())
            except OSError as error:
                _log.debug("compiles without a lock: %s", error)
            yield

    def _acquire(self, file: BinaryIO) -> bool:
        """Wait for the lock; return False if its holder keeps it for too long."""
        waited = 0.0
        while not _try(file):
            if waited >= self._longest_wait:
                _log.warning("waited %.0f s for %s, and compiles this CPU kernel itself", waited, _holder(file))
                return False
            if self._waited >= self._report_at:
                _log.info("waits for %s, which compiles the CPU kernels", _holder(file))
                self._report_at = self._waited + _REPORT_SECONDS
            time.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
            self._waited += _POLL_SECONDS
        return True


def _try(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _own_name() -> str:
    name = multiprocessing.current_process().name
    return f"process {os.getpid()}" if name == "MainProcess" else f"{name} (process {os.getpid()})"


def _holder(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode(errors="replace") or "another process"
