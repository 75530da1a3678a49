"""What is known of one request when it is over. Times are seconds since the traffic began."""

from dataclasses import dataclass
from enum import StrEnum

from e2e_support.traffic.answer import Form
from e2e_support.traffic.prompts import Kind


class FailureKind(StrEnum):
    UNREACHABLE = "unreachable"
    """No connection came about."""
    STATUS = "status"
    """An answer, but not 200."""
    ERROR_EVENT = "error event"
    """A stream that said that it breaks off."""
    BROKEN = "broken connection"
    """The connection ended before the body did."""
    STALLED = "stalled"
    """Nothing came for too long."""
    WRONG = "wrong answer"
    """Not what it must be, or short without saying so. Nothing permits this."""


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
    """Of each chunk that brought something."""
    ended: float
    replica: str | None
    """As the gateway says; None where it gave no answer."""
    failure: Failure | None
    """None: everything about it was right."""

    @property
    def id(self) -> str:
        """What its server's log calls it, under a prefix that the driver chooses."""
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
        """Time to first token; only a stream has one."""
        return self.chunk_times[0] - self.started if self.is_stream and self.chunk_times else None

    @property
    def chunk_gaps(self) -> tuple[float, ...]:
        return tuple(later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What was done, and when."""

    seconds: float
    name: str
