"""The work queue between the watches and ``reconcile(key)``: keys go in, and one run per key comes out.

``Queue`` is the pure core: it merges equal keys, never returns a key that is still running, and knows when the next one
is due. ``Workers`` is its asyncio shell.
"""

import asyncio
import contextlib
import heapq
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

BASE_SECONDS = 0.5
MAX_SECONDS = 15.0


def backoff_seconds(failures: int, *, jitter: float) -> float:
    """Return the wait after ``failures`` failures in a row, with ``jitter`` in 0..1.

    It doubles each time, less up to a quarter.
    """
    ceiling = min(MAX_SECONDS, BASE_SECONDS * 2.0 ** min(failures - 1, 16))
    return ceiling * (1.0 - 0.25 * jitter)


class Queue(Generic[K]):
    """The keys and when they are due. A key is in at most one of: running, ready."""

    def __init__(self) -> None:
        self._ready: OrderedDict[K, None] = OrderedDict()  # in order of arrival
        self._running: set[K] = set()
        self._again: set[K] = set()  # added while they ran
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []  # contains stale entries; _due has the valid ones
        self._failures: dict[K, int] = {}
        self._held: dict[K, float] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return the number of keys that wait for a run now."""
        return len(self._ready) + len(self._again)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, key: K) -> None:
        """Run the key as soon as possible. Many adds are one run; an add during a run causes one more run."""
        if key in self._running:
            self._again.add(key)
        else:
            self._ready.setdefault(key)

    def add_at(self, key: K, due: float) -> None:
        """Run the key at ``due``, or earlier if it is due before."""
        known = self._due.get(key)
        if known is None or due < known:
            self._due[key] = due
            self._count += 1
            heapq.heappush(self._heap, (due, self._count, key))

    def hold(self, key: K, until: float) -> None:
        """Run the key at ``until`` and not before, whatever else is added, because the server requested a delay."""
        self._held[key] = until
        self.add_at(key, until)

    def take(self, now: float) -> K | None:
        """Return the next key to run, or None if none is due. It counts as running until ``finish``."""
        while (due := self.next_due()) is not None and due <= now:
            _, _, key = heapq.heappop(self._heap)
            del self._due[key]
            self.add(key)
            if key in self._ready and self._failures.get(key) == 1:
                self._ready.move_to_end(key, last=False)  # it had its turn; further retries have no precedence
        while self._ready:
            key = next(iter(self._ready))
            del self._ready[key]
            held = self._held.pop(key, now)
            if held <= now:
                self._running.add(key)
                return key
            self.hold(key, held)
        return None

    def finish(self, key: K, *, failed: bool) -> int:
        """End the run of a key. Return the number of its failures in a row."""
        self._running.remove(key)
        if key in self._again:
            self._again.remove(key)
            self._ready.setdefault(key)
        if not failed:
            self._failures.pop(key, None)
            return 0
        self._failures[key] = self._failures.get(key, 0) + 1
        return self._failures[key]

    def next_due(self) -> float | None:
        """Return the time at which the next delayed key is due."""
        while self._heap and self._due.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None


class Workers(Generic[K]):
    """Workers that run the keys of a queue, at most ``limit`` at once, while ``run`` is awaited.

    ``reconcile(key)`` returns the seconds after which to run the key again, or None; it raises to have the key retried.
    ``on_error`` reports the error and returns the seconds until the retry; None leaves that to the backoff.
    """

    def __init__(
        self,
        reconcile: Callable[[K], Awaitable[float | None]],
        *,
        on_error: Callable[[K, Exception], float | None],
        now: Callable[[], float],
        random: Callable[[], float],
        limit: int = 32,
    ) -> None:
        self.queue: Queue[K] = Queue()
        self._reconcile, self._on_error, self._limit = reconcile, on_error, limit
        self._now, self._random = now, random
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, key: K) -> None:
        self.queue.add(key)
        self._wake.set()

    def add_after(self, key: K, seconds: float) -> None:
        self.queue.add_at(key, self._now() + seconds)
        self._wake.set()

    async def run(self, *, grace_seconds: float = 0.0) -> None:
        """Run until cancelled; then active runs get ``grace_seconds`` to end before they are cancelled too."""
        try:
            while True:
                self._start_due()
                await self._sleep_until_work()
        finally:
            await self._stop(grace_seconds)

    def _start_due(self) -> None:
        self._wake.clear()
        while len(self._tasks) < self._limit and (key := self.queue.take(self._now())) is not None:
            task = asyncio.create_task(self._run_one(key), name=f"reconcile {key}")
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._wake.set()

    async def _sleep_until_work(self) -> None:
        due = self.queue.next_due()
        full = len(self._tasks) >= self._limit
        timeout = None if due is None or full else max(0.0, due - self._now())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):  # wait_for of Python 3.11 can lose a cancellation
                await self._wake.wait()

    async def _run_one(self, key: K) -> None:
        try:
            after = await self._reconcile(key)
        except asyncio.CancelledError:
            # The next user of the queue, such as this process when it leads again, starts this key from the beginning.
            self.queue.finish(key, failed=False)
            self.queue.add(key)
            raise
        except Exception as error:
            failures = self.queue.finish(key, failed=True)
            wanted = self._on_error(key, error)
            after = backoff_seconds(failures, jitter=self._random()) if wanted is None else wanted
            self.queue.hold(key, self._now() + after)
        else:
            self.queue.finish(key, failed=False)
            if after is not None:
                self.queue.add_at(key, self._now() + after)

    async def _stop(self, grace_seconds: float) -> None:
        tasks = set(self._tasks)
        if tasks and grace_seconds:
            await asyncio.wait(tasks, timeout=grace_seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
