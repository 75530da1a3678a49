"""The bound of the queue, in sequences and in prompt tokens, and the Retry-After that follows from its measured rate.

A sequence is queued from its submission to the engine until its first step. The time is an argument.
"""

import math
from collections import deque
from dataclasses import dataclass

from quire_common.contract.engine import QUEUE_FULL
from quire_engine.errors import InvalidRequest, Overloaded

_WINDOW_SECONDS = 30.0
_DEFAULT_RETRY_SECONDS = 10
_MAX_SECONDS = 120


@dataclass(frozen=True, slots=True)
class _Departure:
    time: float
    tokens: int


class QueueLimit:
    """A counter of queued sequences and prompt tokens with a bound for each.

    ``reserve`` precedes the submission of sequences; ``release`` follows for each when it first runs, or when it ends
    without having run.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self._max_requests = max_requests
        self.max_tokens = max_tokens
        """The bound in prompt tokens; the server sets it again once the size of the KV cache is known."""
        self._departures: deque[_Departure] = deque()
        self.requests = 0
        self.tokens = 0

    def check_count(self, requests: int) -> None:
        """Raise InvalidRequest for more sequences than an empty queue accepts."""
        if requests > self._max_requests:
            raise InvalidRequest(
                f"{requests} sequences (prompts times n) exceed the {self._max_requests} that may be queued "
                "(--max-queued-requests); send them in several requests"
            )

    def reserve(self, prompt_lengths: list[int], now: float) -> None:
        """Count sequences as queued. Raises Overloaded, InvalidRequest.

        An empty queue accepts prompts of any length: the engine itself refuses a prompt that can never run.
        """
        requests, tokens = len(prompt_lengths), sum(prompt_lengths)
        self.check_count(requests)
        over_requests = self.requests + requests - self._max_requests
        over_tokens = self.tokens + tokens - self.max_tokens if self.requests else 0
        if over_requests > 0 or over_tokens > 0:
            seconds = self._seconds_until_room(over_requests, over_tokens, now)
            raise Overloaded(
                f"the queue is full: {self.requests} sequences with {self.tokens} prompt tokens are queued "
                f"(limits: {self._max_requests} and {self.max_tokens}); try again in {seconds} s",
                code=QUEUE_FULL,
                retry_after_seconds=seconds,
            )
        self.requests += requests
        self.tokens += tokens

    def release(self, prompt_length: int, now: float, *, ran: bool) -> None:
        """Count one sequence as no longer queued; only one that ``ran`` counts for the rate."""
        self.requests -= 1
        self.tokens -= prompt_length
        assert self.requests >= 0 and self.tokens >= 0, "more sequences released than reserved"
        if ran:
            self._departures.append(_Departure(now, prompt_length))
            self._drop_old(now)

    def _drop_old(self, now: float) -> None:
        while self._departures and self._departures[0].time < now - _WINDOW_SECONDS:
            self._departures.popleft()

    def _seconds_until_room(self, over_requests: int, over_tokens: int, now: float) -> int:
        """Estimate the wait from the rate at which sequences and tokens left the queue in the last 30 seconds."""
        self._drop_old(now)
        if not self._departures:
            return _DEFAULT_RETRY_SECONDS
        span = max(1.0, now - self._departures[0].time)
        by_requests = over_requests * span / len(self._departures)
        by_tokens = over_tokens * span / max(1, sum(each.tokens for each in self._departures))
        return min(_MAX_SECONDS, max(1, math.ceil(max(by_requests, by_tokens))))
