"""What the gateway learns from counters: how fast replicas end requests and compute prompts, and how many tokens a byte
of a prompt is.

Fed by ``scrape`` and ``fleet``; ``balance`` weighs what comes of it. No I/O, no clock.
"""

from collections import deque

_RATE_SECONDS = 10.0
_LEAST_TOKENS = 256
"""Fewer in one reading may be a step that was counted in part."""
_HALF_LIFE_SECONDS = 10.0
_HALF_LIFE_REQUESTS = 500.0
_ENOUGH_REQUESTS = 5.0
_USUAL_TOKENS_PER_BYTE = 0.25
_FEWEST_TOKENS_PER_BYTE, _MOST_TOKENS_PER_BYTE = 0.02, 2.0


class Rate:
    """Growth per second of a counter, over the last ``_RATE_SECONDS``."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque()

    def add(self, value: float, now: float) -> float | None:
        """With one more reading; None before a second one, or when nothing grew. A counter that fell starts anew."""
        if self._points and value < self._points[-1][1]:
            self._points.clear()
        self._points.append((now, value))
        while len(self._points) > 2 and self._points[0][0] < now - _RATE_SECONDS:
            self._points.popleft()
        (start, first), (end, last) = self._points[0], self._points[-1]
        return (last - first) / (end - start) if end > start and last > first else None


class PrefillRate:
    """Prompt tokens that one replica computes per second of steps, where it computes any to speak of.

    The mean over tokens, not over time: seconds in which it only decodes say nothing of how fast a prompt would be.
    """

    def __init__(self) -> None:
        self._last: tuple[float, float] | None = None
        self._tokens = self._weighted = 0.0

    def add(self, computed: float, busy_seconds: float) -> float | None:
        """With one more reading of both counters; None while nothing was learnt."""
        tokens, took = (0.0, 0.0) if self._last is None else (computed - self._last[0], busy_seconds - self._last[1])
        self._last = computed, busy_seconds
        if tokens >= _LEAST_TOKENS and took > 0:
            fade = 0.5 ** (took / _HALF_LIFE_SECONDS)
            self._tokens = self._tokens * fade + tokens
            self._weighted = self._weighted * fade + tokens * (tokens / took)
        return self._weighted / self._tokens if self._tokens else None


class _Mean:
    """Of a stream of figures, the older ones faded by those that came since."""

    def __init__(self) -> None:
        self.count = self._sum = 0.0

    def add(self, total: float, count: float) -> None:
        fade = 0.5 ** (count / _HALF_LIFE_REQUESTS)
        self.count = self.count * fade + count
        self._sum = self._sum * fade + total

    @property
    def value(self) -> float:
        return self._sum / self.count


class TokensPerByte:
    """Of the prompts of one model: the engines tell tokens and requests, the gateway knows its own bytes.

    Other gateways may send to the same engines: mean tokens over mean bytes holds all the same.
    """

    def __init__(self) -> None:
        self._bytes = _Mean()
        self._tokens = _Mean()

    def sent(self, num_bytes: int) -> None:
        self._bytes.add(num_bytes, 1.0)

    def arrived(self, tokens: float, requests: float) -> None:
        """By what the engine's two counters grew."""
        if tokens >= 0 and requests > 0:
            self._tokens.add(tokens, requests)

    @property
    def value(self) -> float:
        if min(self._bytes.count, self._tokens.count) < _ENOUGH_REQUESTS or self._bytes.value <= 0:
            return _USUAL_TOKENS_PER_BYTE
        return min(_MOST_TOKENS_PER_BYTE, max(_FEWEST_TOKENS_PER_BYTE, self._tokens.value / self._bytes.value))
