"""A run in a few figures: what ``quire simulate`` and its JSON tell of it. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire_cli.simulation.run import Outcome, SimulatedRun


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

        def percentile(percent: float) -> float:
            position = (len(ordered) - 1) * percent / 100.0
            low = int(position)
            high = min(low + 1, len(ordered) - 1)
            return ordered[low] + (ordered[high] - ordered[low]) * (position - low)

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
    """Asked for at one tick."""
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
    answered = [(r, r.time_to_first_token) for r in scored]
    waits = [(r.own_prefill_seconds, ttft) for r, ttft in answered if ttft is not None]
    prompt_tokens = sum(request.prompt_tokens for request in scored)
    ticks = [decision for decision in run.decisions if run.scored_from <= decision.time <= run.scored_until]
    mean_replicas = run.replica_hours / run.scored_hours if run.scored_hours > 0 else 0.0
    return Summary(
        requests=len(scored),
        attainment=run.attainment(slo_seconds=slo_seconds),
        failed=outcomes[Outcome.FAILED],
        unfinished=outcomes[Outcome.UNFINISHED],
        replica_hours=run.replica_hours,
        hours=run.scored_hours,
        mean_replicas=mean_replicas,
        # Where nothing was decided meanwhile their number was the same all along.
        most_replicas=max(
            (max(decision.current, decision.desired) for decision in ticks), default=round(mean_replicas)
        ),
        changes=run.changes,
        changes_per_hour=run.changes_per_hour,
        worst_queue=run.worst_queue,
        ttft_seconds=Distribution.of([ttft for _, ttft in waits]),
        wait_seconds=Distribution.of([max(0.0, ttft - own) for own, ttft in waits]),
        preemptions=sum(request.preemptions for request in scored),
        cached_share=sum(request.cached_tokens for request in scored) / prompt_tokens if prompt_tokens else 0.0,
    )
