"""A switch that makes the waiting threads of torch's OpenMP runtime sleep at once, or spin for a moment again.

libgomp reads how long to spin when it is loaded (``GOMP_SPINCOUNT``) and has no call to change that. But while it
manages more threads than there are CPUs, no thread spins under a passive ``OMP_WAIT_POLICY``, as its manual documents
for ``GOMP_SPINCOUNT``. The switch is therefore a thread with its own team of sleeping threads: while it lives, no
thread spins; when it ends, its team ends too.
"""

import ctypes
import os
import threading
from typing import Any

from quire_kernels.cpu_runtime.workers import parallel_region

# libgomp ends the process if it cannot start a thread, and the limit is not known here.
_MOST_SLEEPERS = 16


class SpinSwitch:
    """The spin switch of this process.

    It does nothing if it would need many sleeping threads, i.e. with few threads on a machine of many CPUs. Some of
    those CPUs are idle anyway.
    """

    def __init__(self, threads: int) -> None:
        """Prepare the switch for ``threads`` threads that compute together, including the calling one."""
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
        # It does not matter what the team runs, only that it exists.
        self._enter(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p), None, self._team, 0)
        self._made.set()
        self._ended.wait()
