"""Waiting for what a cluster brings about in its own time, with a message that spares the reader a look at the cluster.

An API server that gives no answer for a while is part of what scenarios do: it is waited for like anything else.
"""

import time
from collections.abc import Callable
from typing import Final, TypeVar

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
    """What `look` gives as soon as it is true. Raises ``NotInTime`` with what was seen last and what `explain` says."""
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
    """Explaining asks the cluster as well, which may be away."""
    try:
        return explain()
    except ApiError as error:
        return f"no more is known: {error}"


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._started = clock, clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._started
