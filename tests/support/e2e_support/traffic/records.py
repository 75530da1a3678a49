"""The record of a finished request. Times are seconds since the start of the traffic."""

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
