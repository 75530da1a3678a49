"""The result of traffic: the record of each request, the failures that a scenario permits, and the figures. Pure.

Times are seconds since the start of the traffic. Serving guarantees that unaffected clients notice nothing. An affected
request, such as a stream on a killed replica, may end with an error event, a broken connection or, before its first
byte, a status that asks for a retry. A wrong or silently shortened answer is never permitted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from e2e_support.traffic.answer import Form
from e2e_support.traffic.prompts import Kind


class FailureKind(StrEnum):
    UNREACHABLE = "unreachable"
    """No connection was established."""
    STATUS = "status"
    """The status of the answer was not 200."""
    ERROR_EVENT = "error event"
    """The stream reported an error."""
    BROKEN = "broken connection"
    """The connection ended before the body."""
    STALLED = "stalled"
    """Nothing arrived for too long."""
    WRONG = "wrong answer"
    """The answer was wrong or silently shortened. This is never permitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    kind: FailureKind
    message: str
    status: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    number: int
    prompt: str
    kind: Kind
    form: Form
    expected_tokens: int
    started: float
    chunk_times: tuple[float, ...]
    """The times of each chunk with a part of the answer."""
    ended: float
    replica: str | None
    """The replica as reported by the gateway, or None without an answer."""
    failure: Failure | None
    """The failure, or None if everything was correct."""

    @property
    def id(self) -> str:
        """Return the id in the server's log, below a prefix that the driver chooses."""
        return f"{self.number:05d}"

    @property
    def ok(self) -> bool:
        return self.failure is None

    @property
    def is_stream(self) -> bool:
        return self.form is not Form.WHOLE

    @property
    def first_chunk(self) -> float | None:
        return self.chunk_times[0] if self.chunk_times else None

    @property
    def ttft_seconds(self) -> float | None:
        """Return the time to first token of a stream."""
        return self.chunk_times[0] - self.started if self.is_stream and self.chunk_times else None

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in pairwise(self.chunk_times))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An action and its time."""

    seconds: float
    name: str


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


_TOLD = 12
"""The maximum number of failures in a message."""


class TrafficFailed(AssertionError):
    """Requests failed without a permit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficResult:
    records: tuple[Record, ...]
    """The records, ordered by number."""
    marks: tuple[Mark, ...]
    seconds: float
    """The time from the first request until no request was running."""
    held_back: int
    """Requests that were due but not sent, because too many were running."""

    @property
    def failures(self) -> tuple[Record, ...]:
        return tuple(record for record in self.records if not record.ok)

    @property
    def completed(self) -> int:
        return len(self.records) - len(self.failures)

    def assert_all_right(self, *permits: Permit, at_least: int = 1) -> None:
        """Assert that every answer is complete and correct, except for permitted failures. Raise TrafficFailed."""
        refused = not_permitted(self.records, self.marks, permits)
        if refused:
            lines = [f"  {describe(record, self.marks)}" for record in refused[:_TOLD]]
            if len(refused) > _TOLD:
                lines.append(f"  … and {len(refused) - _TOLD} more")
            head = f"{len(refused)} of {len(self.records)} requests failed, and nothing permits it:"
            raise TrafficFailed("\n".join([head, *lines]))
        if self.completed < at_least:
            raise TrafficFailed(f"only {self.completed} requests completed; less than {at_least} proves nothing")
        if self.held_back:
            raise TrafficFailed(
                f"{self.held_back} requests were not sent, because too many were under way: the rate is more than "
                "the replicas can carry, or they stall"
            )

    def seconds_of(self, mark: str) -> float:
        """Return the time of the last mark of that name."""
        return [one.seconds for one in self.marks if one.name == mark][-1]

    def between(self, start: float, end: float) -> tuple[Record, ...]:
        """Return the requests that started within this period."""
        return tuple(record for record in self.records if start <= record.started < end)

    def longest_gap(self, start: float = 0.0, end: float | None = None) -> float:
        """Return the longest period without a completed answer."""
        until = self.seconds if end is None else end
        ends = sorted(record.ended for record in self.records if record.ok and start <= record.ended <= until)
        return max(later - earlier for earlier, later in pairwise([start, *ends, until]))

    def served_again_after(self, mark: str) -> float | None:
        """Return the seconds from a mark until a request that started after it was answered, or None."""
        since = self.seconds_of(mark)
        ends = [record.ended for record in self.records if record.ok and record.started >= since]
        return min(ends) - since if ends else None

    def by_replica(self) -> Mapping[str, tuple[Record, ...]]:
        """Return the answers by replica, without unanswered requests."""
        names = sorted({record.replica for record in self.records if record.replica is not None})
        return {name: tuple(record for record in self.records if record.replica == name) for name in names}

    def streams_during(self, seconds: float) -> Mapping[str, tuple[Record, ...]]:
        """Return the streams that were running at this time, by replica."""
        return {
            name: running
            for name, records in self.by_replica().items()
            if (running := tuple(one for one in records if one.is_stream and one.started <= seconds < one.ended))
        }


def describe(record: Record, marks: Sequence[Mark]) -> str:
    """Describe a request in one line."""
    failure = "right" if record.failure is None else f"{record.failure.kind}: {record.failure.message}"
    where = record.replica or "no replica"
    last = max((mark for mark in marks if mark.seconds <= record.ended), key=lambda mark: mark.seconds, default=None)
    since = "" if last is None else f", {record.ended - last.seconds:.2f} s after “{last.name}”"
    return (
        f"request {record.id} ({record.prompt}, {record.form}) on {where}, "
        f"{record.started:.2f} to {record.ended:.2f} s{since}: {failure}"
    )
