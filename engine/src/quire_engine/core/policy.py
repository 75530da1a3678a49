"""Who goes first: the order in which waiting sequences are admitted and running ones keep their blocks.

A policy keeps those who wait. ``fcfs`` and ``priority`` give each request its place once, when it arrives; ``fair``
(``fair_share``) decides anew as tenants are served. ``arrival`` counts up, so that no two places are equal.
"""

from typing import Literal, Protocol

from quire_engine.core.fair_share import FairShare
from quire_engine.core.sequence import Order, Request, Sequence
from quire_engine.core.waiting import WaitingQueue

PolicyName = Literal["fcfs", "priority", "fair"]


class Policy(Protocol):
    """No operation looks at the whole queue."""

    num_tokens: int
    """Tokens that the waiting sequences have to compute before they draw another one."""

    def __len__(self) -> int: ...

    def order(self, request: Request, *, arrival: int) -> Order:
        """The sequence's place as it arrives."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def first(self) -> Sequence | None: ...

    def pop(self) -> Sequence: ...

    def discard(self, sequence: Sequence) -> None:
        """Drop a sequence that waits and is ``finished``."""
        ...

    def sequences(self) -> list[Sequence]:
        """All that wait, in no order; for checks and reports, not for the step."""
        ...

    def arrange(self, running: list[Sequence]) -> None:
        """Put the running ones in order before a step: the first is served first, the last gives way first."""
        ...

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Whether a sequence for which there is no room may take that of a running one."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """It runs for the first time; ``num_cached`` of its prompt were found in the cache."""
        ...

    def drew(self, sequences: list[Sequence]) -> None:
        """Each of these drew a token."""
        ...


class FirstComeFirstServed(WaitingQueue):
    def order(self, request: Request, *, arrival: int) -> Order:
        return (0, arrival)

    def arrange(self, running: list[Sequence]) -> None:
        """They are in order."""

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def admitted(self, sequence: Sequence) -> None:
        """Nobody's place depends on it."""

    def drew(self, sequences: list[Sequence]) -> None:
        """Nobody's place depends on it."""


class ByPriority(FirstComeFirstServed):
    """The smallest number first, as vLLM has it; those of one number in order of arrival."""

    def order(self, request: Request, *, arrival: int) -> Order:
        return (request.priority, arrival)


def make_policy(name: PolicyName) -> Policy:
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return ByPriority()
        case "fair":
            return FairShare()
