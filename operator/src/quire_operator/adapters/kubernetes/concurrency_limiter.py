"""How many writes are under way at once: as many as the API server answers quickly, found by trying.

Around each write of ``kube_connection``. A server that works off some writes one by one (each Service's address)
answers the thirtieth of thirty only after all the others; calls that are given up then were work for nothing, and the
retries more of it. So: one more with every round of quick answers, a third less when one was slow (additive increase,
multiplicative decrease, as TCP does it).
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

QUICK_SECONDS, SLOW_SECONDS = 1.5, 3.0
"""A call is given up after ``kube_connection.CALL_SECONDS``."""
FEWEST, FIRST, MOST = 4.0, 16.0, 32.0
_KEPT = 2.0 / 3.0


class Pace:
    """The number, from answer to answer."""

    def __init__(self) -> None:
        self.limit = FIRST
        self._lowered = float("-inf")

    def answered(self, seconds: float, now: float) -> None:
        """A write took so long, whatever came of it."""
        if seconds <= QUICK_SECONDS:
            self.limit = min(MOST, self.limit + 1.0 / self.limit)
        elif seconds >= SLOW_SECONDS and now - self._lowered >= seconds:
            # What was under way together with a slow one tells the same story: it is heard once.
            self.limit, self._lowered = max(FEWEST, self.limit * _KEPT), now


class ConcurrencyLimiter:
    """Lets in as many at once as the pace allows, in the order in which they came."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.limit = Pace()
        self._now = now
        self._inside = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """One write; the time between entering and leaving is its time."""
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
            if turn.done() and not turn.cancelled():  # let in and cancelled at once: the place is somebody else's
                self._inside -= 1
                self._let_in()
            raise

    def _let_in(self) -> None:
        while self._waiting and self._inside < int(self.limit.limit):
            turn = self._waiting.popleft()
            if not turn.done():
                self._inside += 1
                turn.set_result(None)
