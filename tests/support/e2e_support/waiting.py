"""Waiting for a state of the cluster, and a thread that polls it while a scenario runs.

A wait that fails has a message that makes further diagnosis unnecessary. An API server that temporarily does not answer
is a part of some scenarios and is waited for too.
"""

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self, TypeVar

from e2e_support.errors import ApiError, NotInTime

T = TypeVar("T")
POLL_SECONDS: Final = 0.2


def until(
    look: Callable[[], T | None],
    *,
    what: str,
    seconds: float,
    explain: Callable[[], str] = str,
    every: float = POLL_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the first true result of `look`. Raise ``NotInTime`` with the last result and the text of `explain`."""
    started = clock()
    while True:
        seen: object
        try:
            seen = found = look()
            if found:
                return found
        except ApiError as error:
            seen = error
        if clock() - started > seconds:
            raise NotInTime(f"not within {seconds:g} s: {what}\nlast seen: {seen}\n{_explained(explain)}")
        sleep(every)


def _explained(explain: Callable[[], str]) -> str:
    """Return the explanation, even if the cluster does not answer."""
    try:
        return explain()
    except ApiError as error:
        return f"no more is known: {error}"


class Stopwatch:
    """A stopwatch that counts seconds since its creation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._started


EVERY_SECONDS: Final = 0.5
_LAST_SECONDS: Final = 60.0


class Polling:
    """A context manager that calls `poll` at intervals. An error of it ends the polling and is raised on exit."""

    def __init__(self, poll: Callable[[], None], *, every: float = EVERY_SECONDS) -> None:
        self._poll, self._every = poll, every
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="polling", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(_LAST_SECONDS)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise RuntimeError if the polling has failed."""
        if self._error is not None:
            raise RuntimeError("the look at the cluster itself failed") from self._error

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._poll()
                self._stop.wait(self._every)
        except Exception as error:
            self._error = error
