"""The result of a simulation: every request's times, every decision, and the replicas over time.

``simulate`` creates it; tables, plots and benchmarks read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

LATE_SECONDS = 2.0


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    """Its replica died or was ended under it, no replica took it in time, all had too long a queue, or none could ever
    hold it."""
    UNFINISHED = "unfinished"
    """Still under way when the simulation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestResult:
    """One request. Times are seconds from the start of the simulation."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    outcome: Outcome
    replica: str | None
    """The last replica that had it."""
    first_token: float | None
    finish: float | None
    """The time of its end; None if it did not finish."""
    own_prefill_seconds: float
    """The time that its uncached prompt takes on an idle engine."""
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival


def is_late(result: RequestResult, *, slo_seconds: float = LATE_SECONDS) -> bool:
    """Its first token came later than ``slo_seconds`` beyond its own prefill, or it failed."""
    if result.outcome is Outcome.FAILED or result.first_token is None:
        return True
    return result.first_token - result.arrival > slo_seconds + result.own_prefill_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPoint:
    """One tick of the scaler."""

    time: float
    current: int
    desired: int
    """Within the scenario's bounds."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The fleet at one moment, the engines' figures as a scrape shows them: of the end of their last step."""

    time: float
    asked: int
    ready: int
    held: int
    """Requests held by the gateway."""
    waiting: int
    running: int
    kv_usage: float
    """The KV cache usage of all running replicas together, 0 to 1."""


@dataclass(frozen=True, slots=True)
class HoldingStep:
    """From ``time`` on, ``replicas`` hold their hardware: pending, loading, ready and draining ones."""

    time: float
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """One simulation. What is scored lies between ``scored_from`` and ``scored_until``, the last arrival."""

    requests: tuple[RequestResult, ...]
    """In order of arrival."""
    decisions: tuple[DecisionPoint, ...]
    timeline: tuple[TimelinePoint, ...]
    holding: tuple[HoldingStep, ...]
    scored_from: float
    scored_until: float
    worst_queue: int
    """Most requests that waited at one moment, at the engines and in the gateway; of what is scored."""

    @property
    def scored(self) -> tuple[RequestResult, ...]:
        return tuple(r for r in self.requests if r.arrival >= self.scored_from)

    @property
    def scored_hours(self) -> float:
        return (self.scored_until - self.scored_from) / 3600.0

    @property
    def replica_seconds(self) -> float:
        """The scored part of the result."""
        return replica_seconds(self.holding, self.scored_from, self.scored_until)

    @property
    def replica_hours(self) -> float:
        return self.replica_seconds / 3600.0

    @property
    def changes(self) -> int:
        """Decisions for another number, of what is scored."""
        return sum(d.desired != d.current for d in self.decisions if self.scored_from <= d.time <= self.scored_until)

    @property
    def changes_per_hour(self) -> float:
        return self.changes / self.scored_hours if self.scored_hours > 0 else 0.0

    def attainment(self, *, slo_seconds: float = LATE_SECONDS) -> float:
        """Return the share of scored requests that were not late; 1 without requests."""
        scored = self.scored
        late = sum(is_late(r, slo_seconds=slo_seconds) for r in scored)
        return 1.0 - late / len(scored) if scored else 1.0


def replica_seconds(holding: Sequence[HoldingStep], start: float, end: float) -> float:
    """Return the integral of replicas over time."""
    total = 0.0
    for step, until in zip(holding, [*(s.time for s in holding[1:]), end], strict=False):
        total += step.replicas * max(0.0, min(until, end) - max(step.time, start))
    return total
