"""The leader write fence: it is open only while this process is certainly the leader.

``leader`` opens it, and the connection to the API server checks it before each write. It is open for 10 s from when the
last successful renewal was *sent*, and a call takes at most 5 s. So the last write has ended when another operator may
take over after 15 s.
"""

import time
from collections.abc import Callable

FENCE_SECONDS = 10.0


def boottime() -> float:
    """Return the seconds since boot, including time in suspension."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WriteFence:
    """A fence that is open while this process may write."""

    def __init__(self, *, now: Callable[[], float] = boottime, open_seconds: float = FENCE_SECONDS) -> None:
        self._now, self._open_seconds = now, open_seconds
        self._sent: float | None = None

    def renewed(self, sent: float) -> None:
        """Keep the fence open from the time at which a successful renewal was sent."""
        self._sent = sent

    def close(self) -> None:
        self._sent = None

    def is_open(self) -> bool:
        return self._sent is not None and self._now() - self._sent < self._open_seconds
