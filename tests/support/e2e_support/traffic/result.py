"""The result of traffic: correctness, speed, and the serving replicas. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from e2e_support.traffic.permits import Permit, not_permitted
from e2e_support.traffic.records import Mark, Record

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
