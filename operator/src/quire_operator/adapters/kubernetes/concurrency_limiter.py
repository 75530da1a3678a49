"""The limit on concurrent writes (AIMD): as many as the API server answers quickly, found by trying.

``connection`` uses it around each write. A server that executes some writes one by one (such as the allocation of
Service addresses) answers the last of thirty only after all others. The work for calls that time out is wasted, and
their retries add to it. So the limit rises by one with every round of fast answers and falls by a third after a slow
one: additive increase, multiplicative decrease, as in TCP.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

QUICK_SECONDS, SLOW_SECONDS = 1.5, 3.0
"""A call times out after ``connection.CALL_SECONDS``."""
FEWEST, FIRST, MOST = 4.0, 16.0, 32.0
_KEPT = 2.0 / 3.0


class Pace:
    """The current limit, adjusted with each answer."""

    def __init__(self) -> None:
        self.limit = FIRST
        self._lowered = float("-inf")

    def answered(self, seconds: float, now: float) -> None:
        """Adjust the limit to the duration of a write, whatever its result."""
        if seconds <= QUICK_SECONDS:
            self.limit = min(MOST, self.limit + 1.0 / self.limit)
        elif seconds >= SLOW_SECONDS and now - self._lowered >= seconds:
            # Writes that ran together with a slow one have the same cause, so they lower the limit only once.
            self.limit, self._lowered = max(FEWEST, self.limit * _KEPT), now


class ConcurrencyLimiter:
    """A semaphore with an adaptive limit. It admits writes in the order of their arrival."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = Pace()
        self._now = now
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait for admission, run one write and measure its duration."""
        await self._enter()
        started = self._now()
        try:
            yield
        finally:
            now = self._now()
            self.limit.answered(now - started, now)
            self._inside -= 1
            self._let_in()

    async def _enter(self) -> None:
        if not self._waiting and self._inside < int(self.limit.limit):
            self._inside += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # admitted and cancelled at once: pass the place on
                self._inside -= 1
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self._inside < int(self.limit.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)
