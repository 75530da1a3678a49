"""The summary of a run: percentiles of latencies, rates, goodput, errors. Pure.

TTFT (time to first token), ITL (inter-token latency: the gap between two chunks of a
stream), TPOT (time per output token: (end-to-end − TTFT) / (tokens − 1)), E2E (end-to-end latency).
All times are in seconds.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """One request as the client saw it. ``error`` None means: status 200, the stream ended as it should."""

    sent_seconds: float
    first_token_seconds: float | None
    end_seconds: float
    chunk_gaps_seconds: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    requested_tokens: int
    finish_reason: str | None
    status: int | None
    error: str | None

    @property
    def ttft_seconds(self) -> float | None:
        return None if self.first_token_seconds is None else self.first_token_seconds - self.sent_seconds

    @property
    def e2e_seconds(self) -> float:
        return self.end_seconds - self.sent_seconds

    @property
    def tpot_seconds(self) -> float | None:
        if self.first_token_seconds is None or self.output_tokens < 2:
            return None
        return (self.end_seconds - self.first_token_seconds) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The limits for a request to count as good; None is no limit."""

    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None

    @property
    def asked(self) -> bool:
        return (self.ttft_seconds, self.tpot_seconds, self.e2e_seconds) != (None, None, None)

    def met_by(self, outcome: MeasuredRequest) -> bool:
        if outcome.error is not None:
            return False
        measured = (
            (outcome.ttft_seconds, self.ttft_seconds),
            (outcome.tpot_seconds, self.tpot_seconds),
            (outcome.e2e_seconds, self.e2e_seconds),
        )
        return all(limit is None or value is None or value <= limit for value, limit in measured)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSummary:
    requests: int
    succeeded: int
    short: int
    """Succeeded, but with fewer tokens than asked for (a stop token, or the context's end)."""
    errors: dict[str, int]
    duration_seconds: float
    prompt_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    goodput_requests_per_second: float | None
    ttft_seconds: Distribution | None
    itl_seconds: Distribution | None
    tpot_seconds: Distribution | None
    e2e_seconds: Distribution | None


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks of an ascending, non-empty sequence."""
    position = (len(ordered) - 1) * percent / 100.0
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> Distribution | None:
    """None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    p50, p90, p95, p99 = (percentile(ordered, percent) for percent in (50, 90, 95, 99))
    return Distribution(mean=sum(ordered) / len(ordered), p50=p50, p90=p90, p95=p95, p99=p99, max=ordered[-1])


def summarise(outcomes: Sequence[MeasuredRequest], objective: Objective) -> BenchSummary:
    """Rates are over the time from the first request sent to the last answer's end."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    start = min((outcome.sent_seconds for outcome in outcomes), default=0.0)
    duration = max((outcome.end_seconds for outcome in outcomes), default=0.0) - start
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    met = sum(objective.met_by(outcome) for outcome in outcomes)

    def rate(amount: float) -> float:
        return amount / duration if duration > 0 else 0.0

    return BenchSummary(
        requests=len(outcomes),
        succeeded=len(good),
        short=sum(outcome.output_tokens < outcome.requested_tokens for outcome in good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None).most_common()),
        duration_seconds=duration,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        requests_per_second=rate(len(good)),
        output_tokens_per_second=rate(output_tokens),
        total_tokens_per_second=rate(prompt_tokens + output_tokens),
        goodput_requests_per_second=rate(met) if objective.asked else None,
        ttft_seconds=distribution([o.ttft_seconds for o in good if o.ttft_seconds is not None]),
        itl_seconds=distribution([gap for o in good for gap in o.chunk_gaps_seconds]),
        tpot_seconds=distribution([o.tpot_seconds for o in good if o.tpot_seconds is not None]),
        e2e_seconds=distribution([o.e2e_seconds for o in good]),
    )
