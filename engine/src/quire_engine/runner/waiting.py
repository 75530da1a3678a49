"""How threads that have done their share of a parallel region wait for the next: spinning, or asleep.

A step is a hundred regions some tens of microseconds apart, and waking a thread that sleeps takes about as long as a
small layer: where nobody else wants the CPUs, threads that spin for a moment make a step up to twice as fast. Beside
a busy process they make it several times slower, as the thread that is waited for is kept from its core by one that
only spins (ADR 0052). So threads spin while, by the kernel's own account, they are given their cores when they ask.

``next_wait`` decides; ``Waits`` reads the account once in a while and tells the switch.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_log = logging.getLogger(__name__)
_WINDOW_SECONDS = 0.1
# Shares of the time of all compute threads that they stood in a run queue. The engine's own API process, on the same
# two cores under full load, takes less than the first; one busy neighbour more, and while threads sleep more than the
# second.
_TOO_MUCH = 0.25
_LITTLE = 0.1
# How long threads sleep before they spin again, for a trial: longer each time that it went badly at once.
_SHORTEST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    spinning: bool
    since: float
    patience_seconds: float = _SHORTEST_SECONDS


def next_wait(wait: Wait, *, queued_share: float, now: float) -> Wait:
    """``queued_share``: of the threads' time since the last look, what they stood in a run queue."""
    lasted = now - wait.since
    if wait.spinning and queued_share > _TOO_MUCH:
        failed_at_once = lasted < wait.patience_seconds
        patience = min(_LONGEST_SECONDS, 2.0 * wait.patience_seconds) if failed_at_once else _SHORTEST_SECONDS
        return Wait(spinning=False, since=now, patience_seconds=patience)
    if not wait.spinning and lasted >= wait.patience_seconds and queued_share < _LITTLE:
        return Wait(spinning=True, since=now, patience_seconds=wait.patience_seconds)
    return wait


class Switch(Protocol):
    def spin(self) -> None: ...

    def sleep(self) -> None: ...


class Waits:
    """Looks at most every tenth of a second; where the kernel keeps no account, threads sleep."""

    def __init__(
        self,
        switch: Switch,
        *,
        threads: int,
        queued_seconds: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._switch = switch
        self._threads = threads
        self._queued_seconds = queued_seconds or seconds_in_run_queues
        self._clock = clock
        self._looked = clock()
        self._queued = self._queued_seconds()
        self._wait = Wait(spinning=self._queued is not None, since=self._looked)
        if not self._wait.spinning:
            switch.sleep()

    @property
    def spinning(self) -> bool:
        return self._wait.spinning

    def look(self) -> None:
        """Called before each step."""
        now = self._clock()
        if now - self._looked < _WINDOW_SECONDS or self._queued is None:
            return
        queued = self._queued_seconds()
        if queued is None:
            return
        # A thread that has ended takes its account with it.
        share = max(0.0, queued - self._queued) / ((now - self._looked) * self._threads)
        self._looked, self._queued = now, queued
        before, self._wait = self._wait, next_wait(self._wait, queued_share=share, now=now)
        if self._wait.spinning != before.spinning:
            (self._switch.spin if self._wait.spinning else self._switch.sleep)()
            _log.debug(
                "threads waited for their cores %.0f %% of the time: from now on they wait for one another %s",
                share * 100.0,
                "spinning" if self._wait.spinning else "asleep",
            )

    def close(self) -> None:
        """Leaves the process as it was."""
        self._switch.spin()


def seconds_in_run_queues(tasks: Path = Path("/proc/self/task")) -> float | None:
    """How long the threads that this process has now were ready to run and did not; None where nobody counts it."""
    nanoseconds = 0
    try:
        names = os.listdir(tasks)
    except OSError:
        return None
    counted = False
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end in between
            ran, queued = (int(figure) for figure in (tasks / name / "schedstat").read_text().split()[:2])
            nanoseconds += queued
            counted = counted or ran > 0  # all zeros: a kernel that was built without counting
    return nanoseconds / 1e9 if counted else None
