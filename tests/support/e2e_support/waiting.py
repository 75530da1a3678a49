"""Waiting for a state of the cluster, with a message that makes further diagnosis unnecessary.

An API server that temporarily does not answer is a part of some scenarios and is waited for too.
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
