"""Waiting for the results of controllers."""

import time
from collections.abc import Callable
from typing import Final

POLL_SECONDS: Final = 0.05


def eventually(condition: Callable[[], bool], *, seconds: float = 90) -> bool:
    """Return True if the condition became true in time; assert on it."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
