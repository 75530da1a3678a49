"""How much may wait, and when to come back: a bounded queue in sequences and prompt tokens, with its measured drain.

Pure but for its counters: the time is given. What waits is what was sent to the engine and has not run yet.
"""

import math
from collections import deque
from dataclasses import dataclass

from quire_engine.errors import InvalidRequest, Overloaded

_WINDOW_SECONDS = 30.0
_UNMEASURED_SECONDS = 10
_MAX_SECONDS = 120


@dataclass(frozen=True, slots=True)
class _Left:
    time: float
    tokens: int


class Admission:
    """``enter`` before sequences are sent, ``leave`` for each when it first runs or ends without having run."""

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self.max_tokens = max_tokens
        """Set anew once the size of the KV cache is known."""
        self._left: deque[_Left] = deque()
        self.requests = 0
        self.tokens = 0

    def check_count(self, requests: int) -> None:
        """Raises InvalidRequest where no queue could hold so many."""
        if requests > self._max_requests:
            raise InvalidRequest(
                f"{requests} sequences (prompts times n) are more than may wait here ({self._max_requests}); "
                "send them in several requests"
            )

    def enter(self, prompt_lengths: list[int], now: float) -> None:
        """Take a place in the queue for each. Raises Overloaded, InvalidRequest.

        An empty queue takes prompts of any length: what can never run, the engine refuses by itself.
        """
        requests, tokens = len(prompt_lengths), sum(prompt_lengths)
        self.check_count(requests)
        over_requests = self.requests + requests - self._max_requests
        over_tokens = self.tokens + tokens - self.max_tokens if self.requests else 0
        if over_requests > 0 or over_tokens > 0:
            seconds = self._seconds_until_room(over_requests, over_tokens, now)
            raise Overloaded(
                f"{self.requests} sequences with {self.tokens} prompt tokens wait already "
                f"(limits: {self._max_requests} and {self.max_tokens}); try again in {seconds} s",
                retry_after_seconds=seconds,
            )
        self.requests += requests
        self.tokens += tokens

    def leave(self, prompt_length: int, now: float, *, ran: bool) -> None:
        self.requests -= 1
        self.tokens -= prompt_length
        assert self.requests >= 0 and self.tokens >= 0, "left more often than entered"
        if ran:
            self._left.append(_Left(now, prompt_length))
            self._forget(now)

    def _forget(self, now: float) -> None:
        while self._left and self._left[0].time < now - _WINDOW_SECONDS:
            self._left.popleft()

    def _seconds_until_room(self, over_requests: int, over_tokens: int, now: float) -> int:
        """At the rate at which sequences and tokens left the queue in the last half minute."""
        self._forget(now)
        if not self._left:
            return _UNMEASURED_SECONDS
        span = max(1.0, now - self._left[0].time)
        by_requests = over_requests * span / len(self._left)
        by_tokens = over_tokens * span / max(1, sum(left.tokens for left in self._left))
        return min(_MAX_SECONDS, max(1, math.ceil(max(by_requests, by_tokens))))
