"""The speed of replicas, learned from their counters: finished requests and prompt tokens per second.

``balance`` compares replicas by these figures. The caller passes the time and the counters.
"""

from collections import deque

_RATE_SECONDS = 10.0
_LEAST_TOKENS = 256
"""Fewer tokens between two readings may be a step that was counted in part."""
_HALF_LIFE_SECONDS = 10.0


class Rate:
    """A counter's growth per second over the last ten seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def update(self, value: float, now: float) -> float | None:
        """Return the rate including this reading; None before a second reading, or when nothing grew.

        A counter that fell belongs to a new process, so its history starts again.
        """
        if self._points and value < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, value))
        while len(self._points) > 2 and self._points[0][0] < now - _RATE_SECONDS:
            self._points.popleft()
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None


class PrefillRate:
    """The prompt tokens that a replica computes per second of steps that compute prompts.

    The mean is over tokens, not over time: seconds in which a replica only decodes do not show how fast a prompt
    would be.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._tokens = self._weighted = 0.0

    def update(self, computed: float, busy_seconds: float) -> float | None:
        """Return the rate including this reading of both counters; None while nothing is known."""
        tokens, took = (0.0, 0.0) if self._last is None else (computed - self._last[0], busy_seconds - self._last[1])
        self._last = computed, busy_seconds
        if tokens >= _LEAST_TOKENS and took > 0:
            fade = 0.5 ** (took / _HALF_LIFE_SECONDS)
            self._tokens = self._tokens * fade + tokens
            self._weighted = self._weighted * fade + tokens * (tokens / took)
        return self._weighted / self._tokens if self._tokens else None
