"""Waiting for what controllers bring about in their own time."""

import time
from collections.abc import Callable
from typing import Final

POLL_SECONDS: Final = 0.05


def eventually(condition: Callable[[], bool], *, seconds: float = 90) -> bool:
    """Whether it became true within the time. To be asserted."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)
    return True
