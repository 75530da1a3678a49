"""The way in which threads wait for the next parallel region: spinning, or asleep.

A step is a hundred regions some tens of microseconds apart, and waking a sleeping thread takes about as long as a small
layer. If no other process needs the CPUs, threads that spin for a moment make a step up to twice as fast. With a busy
neighbour they make it several times slower, because a spinning thread keeps the awaited one from its core (ADR 0052).
Threads therefore spin while the kernel's accounting shows that they get their cores when they need them.

``next_wait`` decides; ``Waits`` reads the accounting at intervals and sets the switch.
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
# Shares of the time of all compute threads that they spent in a run queue. The engine's own API process, on the same
# two cores under full load, causes less than the first; one busy neighbour causes more, and more than the second while
# threads sleep.
_TOO_MUCH = 0.25
_LITTLE = 0.1
# How long threads sleep before they spin again, for a trial: longer after each trial that failed at once.
_SHORTEST_SECONDS = 1.0
_LONGEST_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    spinning: bool
    since: float
    patience_seconds: float = _SHORTEST_SECONDS


def next_wait(wait: Wait, *, queued_share: float, now: float) -> Wait:
    """Return the next way to wait. ``queued_share`` is the share of the threads' recent time in a run queue."""
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
    """The switch between spinning and sleeping, checked at most every tenth of a second.

    Threads sleep if the kernel has no accounting.
    """

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
        self._polled = clock()
        self._queued = self._queued_seconds()
        self._wait = Wait(spinning=self._queued is not None, since=self._polled)
        if not self._wait.spinning:
            switch.sleep()

    @property
    def spinning(self) -> bool:
        return self._wait.spinning

    def poll(self) -> None:
        """Check the accounting; called before each step."""
        now = self._clock()
        if now - self._polled < _WINDOW_SECONDS or self._queued is None:
            return
        queued = self._queued_seconds()
        if queued is None:
            return
        # The account of a thread that ended is lost.
        share = max(0.0, queued - self._queued) / ((now - self._polled) * self._threads)
        self._polled, self._queued = now, queued
        before, self._wait = self._wait, next_wait(self._wait, queued_share=share, now=now)
        if self._wait.spinning != before.spinning:
            (self._switch.spin if self._wait.spinning else self._switch.sleep)()
            _log.debug(
                "threads waited for their cores %.0f %% of the time: from now on they wait for one another %s",
                share * 100.0,
                "spinning" if self._wait.spinning else "asleep",
            )

    def close(self) -> None:
        """Restore the process's state."""
        self._switch.spin()


def seconds_in_run_queues(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Return how long the current threads were ready but did not run; None if the kernel does not count it."""
    nanoseconds = 0
    try:
        names = os.listdir(tasks)
    except OSError:
        return None
    counted = False
    for name in names:
        with contextlib.suppress(OSError, ValueError, IndexError):  # a thread may end meanwhile
            ran, queued = (int(figure) for figure in (tasks / name / "schedstat").read_text().split()[:2])
            nanoseconds += queued
            counted = counted or ran > 0  # all zeros: a kernel without accounting
    return nanoseconds / 1e9 if counted else None
