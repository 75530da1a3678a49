"""The result of a simulation: every request's times, every decision, the replicas over time; and a summary. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

LATE_SECONDS = 2.0


class Outcome(StrEnum):
    FINISHED = "finished"
    FAILED = "failed"
    """Its replica died or ended, no replica took it in time, all queues were full, or none could ever hold it."""
    UNFINISHED = "unfinished"
    """Still running when the simulation ended."""


@dataclass(slots=True)
class RequestResult:
    """One request. Times are seconds from the start of the simulation."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    outcome: Outcome = Outcome.UNFINISHED
    replica: str | None = None
    """The last replica that had it."""
    first_token: float | None = None
    finish: float | None = None
    own_prefill_seconds: float = 0.0
    """The time that its uncached prompt takes on an idle engine."""
    cached_tokens: int = 0
    preemptions: int = 0


def is_late(result: RequestResult, *, slo_seconds: float = LATE_SECONDS) -> bool:
    """Return whether its first token came later than ``slo_seconds`` beyond its own prefill, or it failed."""
    if result.outcome is Outcome.FAILED or result.first_token is None:
        return True
    return result.first_token - result.arrival > slo_seconds + result.own_prefill_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPoint:
    """One tick of the scaler. ``desired`` is within the scenario's bounds."""

    time: float
    current: int
    desired: int
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelinePoint:
    """The fleet at one moment; the engines' figures are those of a scrape, from the end of their last step."""

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
    """One simulation. The scored part lies between ``scored_from`` and ``scored_until``, the last arrival."""

    requests: tuple[RequestResult, ...]
    """In order of arrival."""
    decisions: tuple[DecisionPoint, ...]
    timeline: tuple[TimelinePoint, ...]
    holding: tuple[HoldingStep, ...]
    scored_from: float
    scored_until: float
    worst_queue: int
    """The most requests that waited at one moment of the scored part, at the engines and in the gateway."""

    @property
    def scored(self) -> tuple[RequestResult, ...]:
        return tuple(r for r in self.requests if r.arrival >= self.scored_from)

    @property
    def scored_hours(self) -> float:
        return (self.scored_until - self.scored_from) / 3600.0

    @property
    def replica_hours(self) -> float:
        """The integral of replicas over the scored time."""
        ends = [*(step.time for step in self.holding[1:]), self.scored_until]
        parts = (
            step.replicas * max(0.0, min(end, self.scored_until) - max(step.time, self.scored_from))
            for step, end in zip(self.holding, ends, strict=False)
        )
        return sum(parts) / 3600.0

    @property
    def ticks(self) -> tuple[DecisionPoint, ...]:
        """The decisions of the scored part."""
        return tuple(d for d in self.decisions if self.scored_from <= d.time <= self.scored_until)

    @property
    def changes(self) -> int:
        return sum(tick.desired != tick.current for tick in self.ticks)

    @property
    def changes_per_hour(self) -> float:
        return self.changes / self.scored_hours if self.scored_hours > 0 else 0.0

    def attainment(self, *, slo_seconds: float = LATE_SECONDS) -> float:
        """Return the share of scored requests that were not late; 1 without requests."""
        scored = self.scored
        late = sum(is_late(r, slo_seconds=slo_seconds) for r in scored)
        return 1.0 - late / len(scored) if scored else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """Return the mean and the percentiles, interpolated between the closest ranks; None without values."""
        if not values:
            return None
        ordered = sorted(values)

        def percentile(percent: int) -> float:
            low, share = divmod((len(ordered) - 1) * percent / 100.0, 1.0)
            first, second = ordered[int(low)], ordered[min(int(low) + 1, len(ordered) - 1)]
            return first + (second - first) * share

        p50, p90, p95, p99 = map(percentile, (50, 90, 95, 99))
        return cls(mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The summary of the scored part: requests between the warm-up and the last arrival, and replicas meanwhile."""

    requests: int
    attainment: float
    """Share of the requests whose first token came in time, 0 to 1."""
    failed: int
    unfinished: int
    replica_hours: float
    hours: float
    mean_replicas: float
    most_replicas: int
    """Requested at one tick."""
    changes: int
    changes_per_hour: float
    worst_queue: int
    ttft_seconds: Distribution | None
    wait_seconds: Distribution | None
    """The time to first token after an immediate prefill."""
    preemptions: int
    cached_share: float
    """The share of prompt tokens found in a prefix cache."""


def summarise(run: SimulatedRun, *, slo_seconds: float) -> Summary:
    scored = run.scored
    outcomes = Counter(request.outcome for request in scored)
    waits = [(r.own_prefill_seconds, r.first_token - r.arrival) for r in scored if r.first_token is not None]
    prompt_tokens = sum(request.prompt_tokens for request in scored)
    mean_replicas = run.replica_hours / run.scored_hours if run.scored_hours > 0 else 0.0
    return Summary(
        requests=len(scored),
        attainment=run.attainment(slo_seconds=slo_seconds),
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        replica_hours=run.replica_hours,
        hours=run.scored_hours,
        mean_replicas=mean_replicas,
        # Without a decision, their number was the same all the time.
        most_replicas=max((max(tick.current, tick.desired) for tick in run.ticks), default=round(mean_replicas)),
        changes=run.changes,
        changes_per_hour=run.changes_per_hour,
        worst_queue=run.worst_queue,
        ttft_seconds=Distribution.of([ttft for _, ttft in waits]),
        wait_seconds=Distribution.of([max(0.0, ttft - own) for own, ttft in waits]),
        preemptions=sum(request.preemptions for request in scored),
        cached_share=sum(request.cached_tokens for request in scored) / prompt_tokens if prompt_tokens else 0.0,
    )
