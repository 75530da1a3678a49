"""The gate that every write passes: open only while this process is surely the leader.

``leader`` opens it, the connection to the API server asks it. It is open for 10 s from when the last successful renewal
was *sent*, and a call takes at most 5 s, so that the last write has ended when others, after 15 s, may begin.
"""

import time
from collections.abc import Callable

FENCE_SECONDS = 10.0


def boottime() -> float:
    """Seconds since boot, those of suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class WriteFence:
    """Whether this process may write now."""

    def __init__(self, *, now: Callable[[], float] = boottime, open_seconds: float = FENCE_SECONDS) -> None:
        self._now, self._open_seconds = now, open_seconds
        self._sent: float | None = None

    def renewed(self, sent: float) -> None:
        """A renewal sent then has succeeded."""
        self._sent = sent

    def close(self) -> None:
        self._sent = None

    def is_open(self) -> bool:
        return self._sent is not None and self._now() - self._sent < self._open_seconds
