"""Makes the threads of torch's OpenMP runtime sleep at once when they wait, and spin for a moment again.

libgomp reads how long to spin when it is loaded (``GOMP_SPINCOUNT``), and offers no call to change that. But while it
manages more threads than there are CPUs it lets none of them spin under a passive ``OMP_WAIT_POLICY``, as its manual
says of ``GOMP_SPINCOUNT``. So a thread with a team of sleepers of its own is the switch: while it lives, nobody spins;
as it ends, so does its team.
"""

import ctypes
import os
import threading
from typing import Any

from quire_kernels.cpu_runtime.workers import parallel_region

# libgomp ends the process where it cannot start a thread, and how many more may be started is not ours to know.
_MOST_SLEEPERS = 16


class SpinSwitch:
    """Of this process. Threads go on spinning where it would take many sleepers: a few threads on a machine of many
    CPUs, of which some are idle."""

    def __init__(self, threads: int) -> None:
        """threads  that compute together, the calling one included"""
        cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._team = max(2, cpus - threads + 2)
        self._sleepers: _Sleepers | None = None

    def spin(self) -> None:
        if self._sleepers is not None:
            self._sleepers.end()
            self._sleepers = None

    def sleep(self) -> None:
        enter = parallel_region()
        if self._sleepers is None and enter is not None and self._team <= _MOST_SLEEPERS:
            self._sleepers = _Sleepers(enter, self._team)


class _Sleepers:
    def __init__(self, enter: Any, team: int) -> None:
        self._enter = enter
        self._team = team
        self._made = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._hold, name="openmp-sleepers", daemon=True)
        self._thread.start()
        self._made.wait()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _hold(self) -> None:
        # What the team does once does not matter: it must only have been one.
        self._enter(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p), None, self._team, 0)
        self._made.set()
        self._ended.wait()
