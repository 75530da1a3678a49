"""Scheduling policies: the order in which waiting sequences are admitted and running ones keep their blocks.

A policy owns the waiting sequences. ``fcfs`` and ``priority`` assign each request its place once, at arrival; ``fair``
(``fair_share``) decides again as tenants are served. ``arrival`` counts up, so no two places are equal.
"""

from typing import Protocol

from quire_engine.core.fair_share import FairShare
from quire_engine.core.options import PolicyName
from quire_engine.core.sequence import Order, Request, Sequence
from quire_engine.core.waiting import WaitingQueue


class Policy(Protocol):
    """A scheduling policy. No operation visits the whole queue."""

    @property
    def num_tokens(self) -> int:
        """The tokens that the waiting sequences have to compute before they sample another one."""
        ...

    def __len__(self) -> int: ...

    def order(self, request: Request, *, arrival: int) -> Order:
        """Return the sequence's place at its arrival."""
        ...

    def push(self, sequence: Sequence) -> None: ...

    def first(self) -> Sequence | None: ...

    def pop(self) -> Sequence: ...

    def discard(self, sequence: Sequence) -> None:
        """Remove a waiting sequence that is ``finished``."""
        ...

    def grew(self, sequence: Sequence, count: int) -> None:
        """Record that a waiting sequence has so many more tokens, from a step that was in flight at its preemption."""
        ...

    def sequences(self) -> list[Sequence]:
        """Return all waiting sequences, in no order; for checks and reports, not for the step."""
        ...

    def arrange(self, running: list[Sequence]) -> None:
        """Sort the running sequences before a step: the first is served first, the last is preempted first."""
        ...

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        """Return whether a sequence without room may take that of a running one."""
        ...

    def admitted(self, sequence: Sequence) -> None:
        """Record the first admission of a sequence; ``num_cached`` tokens of its prompt were in the cache."""
        ...

    def record_sampled(self, sequences: list[Sequence]) -> None:
        """Record that each of these sequences sampled a token."""
        ...


class NestedPolicy(Policy, Protocol):
    """A policy inside ``AdapterQueue``, in which sequences wait for a slot."""

    def set_aside(self) -> Sequence:
        """Remove the first sequence without serving it: it waits elsewhere, for ``put_back`` or ``discard_aside``."""
        ...

    def put_back(self, sequence: Sequence) -> None:
        """Return a sequence that was set aside."""
        ...

    def discard_aside(self, sequence: Sequence) -> None:
        """Record the end of a sequence that was set aside."""
        ...


class FirstComeFirstServed(WaitingQueue):
    def order(self, request: Request, *, arrival: int) -> Order:
        return (0, arrival)

    def set_aside(self) -> Sequence:
        return self.pop()

    def put_back(self, sequence: Sequence) -> None:
        self.push(sequence)

    def discard_aside(self, sequence: Sequence) -> None:
        """Do nothing: no place depends on it."""

    def arrange(self, running: list[Sequence]) -> None:
        """Do nothing: the running sequences are in order."""

    def displaces(self, waiting: Sequence, running: Sequence) -> bool:
        return False

    def admitted(self, sequence: Sequence) -> None:
        """Do nothing: no place depends on it."""

    def record_sampled(self, sequences: list[Sequence]) -> None:
        """Do nothing: no place depends on it."""


class ByPriority(FirstComeFirstServed):
    """A policy that serves the smallest number first, as in vLLM, and equal numbers in order of arrival."""

    def order(self, request: Request, *, arrival: int) -> Order:
        return (request.priority, arrival)


def make_policy(name: PolicyName) -> NestedPolicy:
    match name:
        case "fcfs":
            return FirstComeFirstServed()
        case "priority":
            return ByPriority()
        case "fair":
            return FairShare()
