"""The memory of all request bodies together, from the first byte until the prompts are encoded. No I/O, no clock."""

from typing import Self

from quire_engine.errors import Unavailable

_RETRY_SECONDS = 2
SMALL_BYTES = 64 * 1024
_LARGE_SHARE = 0.75
"""The share of the budget that large bodies may use, so that slow uploads leave room for ordinary requests."""


class BodyBudget:
    """A counter of the bytes of all bodies, with a bound. Only for the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.held = 0
        """The bytes of all bodies."""
        self._held_by_large = 0

    def lease(self) -> "BodyLease":
        """Return the share of one body, which is still empty."""
        return BodyLease(self)

    def take(self, before: int, count: int) -> None:
        """Count further bytes of a body that has ``before``. Raises Unavailable where they exceed the budget."""
        large = _large(before + count) - _large(before)
        over = self.held + count > self._max_bytes
        if over or (large and self._held_by_large + large > self._max_bytes * _LARGE_SHARE):
            raise Unavailable(
                f"the request bodies that this server is reading exceed {self._max_bytes} bytes "
                "(--body-memory); try again shortly",
                code="too_many_bodies",
                retry_after_seconds=_RETRY_SECONDS,
            )
        self.held += count
        self._held_by_large += large

    def give_back(self, count: int) -> None:
        """Count the bytes of a body as free."""
        self.held -= count
        self._held_by_large -= _large(count)


def _large(count: int) -> int:
    return count if count > SMALL_BYTES else 0


class BodyLease:
    """The bytes of one body, which count until the end of the ``with`` block."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._budget.give_back(self.num_bytes)
        self.num_bytes = 0

    def add(self, count: int) -> None:
        """Count further bytes. Raises Unavailable where they exceed the budget."""
        self._budget.take(self.num_bytes, count)
        self.num_bytes += count
