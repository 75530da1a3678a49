"""Failures that a scenario permits. Pure.

Serving guarantees that unaffected clients notice nothing. An affected request, such as a stream on a killed replica,
may end with an error event, a broken connection or, before its first byte, a status that asks for a retry. A wrong or
silently shortened answer is never permitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from e2e_support.traffic.records import FailureKind, Mark, Record

CUT: frozenset[FailureKind] = frozenset({FailureKind.ERROR_EVENT, FailureKind.BROKEN})
"""The kinds of failure of a stream whose server is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Permit:
    why: str
    kinds: frozenset[FailureKind]
    after: str
    """The mark at which the permit starts (the last one of that name)."""
    within_seconds: float
    """The duration from then."""
    replica: str | None = None
    """The only replica to which it applies."""
    at_most: int | None = None

    def __post_init__(self) -> None:
        if FailureKind.WRONG in self.kinds:
            raise ValueError("a wrong answer cannot be permitted")

    def covers(self, record: Record, marks: Sequence[Mark]) -> bool:
        failure = record.failure
        if failure is None or failure.kind not in self.kinds:
            return False
        if self.replica is not None and record.replica != self.replica:
            return False
        begins = [mark.seconds for mark in marks if mark.name == self.after]
        return bool(begins) and begins[-1] <= record.ended <= begins[-1] + self.within_seconds


def not_permitted(records: Sequence[Record], marks: Sequence[Mark], permits: Sequence[Permit]) -> list[Record]:
    """Return the failures that no permit covers, in the order of their ends."""
    left = {permit: permit.at_most for permit in permits}
    refused = []
    for record in sorted((record for record in records if not record.ok), key=lambda record: record.ended):
        for permit in permits:
            remaining = left[permit]
            if remaining != 0 and permit.covers(record, marks):
                left[permit] = None if remaining is None else remaining - 1
                break
        else:
            refused.append(record)
    return refused
