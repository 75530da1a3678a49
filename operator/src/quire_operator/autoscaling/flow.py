"""Increments of counters: what happened at the replicas since the last tick.

A restarted engine counts from zero again; a replica without an earlier sample has no increment yet.
"""

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from quire_operator.api.scaling import ScalingTargets
from quire_operator.autoscaling.history import Flow, LateCount
from quire_operator.autoscaling.observation import Histogram, ReplicaSample
from quire_operator.autoscaling.rates import Evidence, Work
from quire_operator.autoscaling.supply import SAMPLE_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Increment:
    """The increments of one replica's counters."""

    seconds: float
    """The time between the two samples."""
    requests: float
    prompt_tokens: float
    first_tokens: float
    late_first_tokens: float
    whole_first_tokens: LateCount
    token_gaps: LateCount
    work: Work | None
    finished_requests: float
    all_prompt_tokens: float
    generation_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The latencies from which requests count as late, in seconds; None where no target is set."""

    wait: float
    whole_first_token: float | None = None
    token_gap: float | None = None

    @classmethod
    def of(cls, targets: ScalingTargets) -> "Thresholds":
        first, gap = targets.total_time_to_first_token, targets.inter_token_latency
        return cls(
            wait=targets.wait.threshold_seconds,
            whole_first_token=None if first is None else first.threshold_seconds,
            token_gap=None if gap is None else gap.threshold_seconds,
        )


def increment(before: ReplicaSample, after: ReplicaSample, thresholds: Thresholds) -> Increment:
    """Return the increment between two samples of one replica, also across a restart of its engine."""
    base = _since_restart(before) if _restarted(before, after) else before
    prompts = after.prompt_tokens - base.prompt_tokens
    cached = min(prompts, max(0.0, after.cached_prompt_tokens - base.cached_prompt_tokens))
    generated = after.generation_tokens - base.generation_tokens
    rejected = max(0.0, after.rejected_drafts - base.rejected_drafts)
    finished = after.finished_requests - base.finished_requests
    waits = _late(base.first_token_waits, after.first_token_waits, thresholds.wait)
    return Increment(
        seconds=after.time - before.time,
        requests=_arrivals(base, after, finished),
        prompt_tokens=_arrived_tokens(base, after, prompts - cached),
        first_tokens=waits.total,
        late_first_tokens=waits.late,
        whole_first_tokens=_late(base.first_token_times, after.first_token_times, thresholds.whole_first_token),
        token_gaps=_late(base.token_gaps, after.token_gaps, thresholds.token_gap),
        work=_work(base, after, prefill_tokens=prompts - cached, decode_tokens=generated + rejected),
        finished_requests=finished,
        all_prompt_tokens=prompts,
        generation_tokens=generated,
    )


def flow(increments: Iterable[Increment], *, seconds: float, now: float) -> Flow:
    """Return the sum of all replicas' increments over one tick.

    Increments over a longer period without samples count at their mean rate, because all of them at once would look
    like a burst.
    """
    parts = [(part, seconds / part.seconds if part.seconds > SAMPLE_SECONDS else 1.0) for part in increments]
    return Flow(
        time=now,
        seconds=seconds,
        requests=sum(part.requests * share for part, share in parts),
        prompt_tokens=sum(part.prompt_tokens * share for part, share in parts),
        first_tokens=sum(part.first_tokens * share for part, share in parts),
        late_first_tokens=sum(part.late_first_tokens * share for part, share in parts),
        whole_first_tokens=_sum((part.whole_first_tokens, share) for part, share in parts),
        token_gaps=_sum((part.token_gaps, share) for part, share in parts),
    )


def _sum(counts: Iterable[tuple[LateCount, float]]) -> LateCount:
    total = late = 0.0
    for count, share in counts:
        total += count.total * share
        late += count.late * share
    return LateCount(total, late)


def learnt(evidence: Evidence, increments: Iterable[Increment]) -> Evidence:
    for part in increments:
        if part.work is not None:
            evidence = evidence.with_work(part.work)
        evidence = evidence.with_requests(
            requests=part.finished_requests, prompt_tokens=part.all_prompt_tokens, output_tokens=part.generation_tokens
        )
    return evidence


def share_above(histogram: Histogram, threshold: float) -> float:
    """Return the number of observations above ``threshold``, which are assumed to be uniform within its bucket."""
    index = bisect_left(histogram.bounds, threshold)
    if index >= len(histogram.bounds) - 1:
        # The last bucket is unbounded and does not say how far its observations are above.
        return histogram.total - histogram.counts[-2] if len(histogram.counts) > 1 else 0.0
    upper, below_upper = histogram.bounds[index], histogram.counts[index]
    lower = histogram.bounds[index - 1] if index else 0.0
    below_lower = histogram.counts[index - 1] if index else 0.0
    inside = (threshold - lower) / (upper - lower)
    return histogram.total - (below_lower + (below_upper - below_lower) * inside)


def _restarted(before: ReplicaSample, after: ReplicaSample) -> bool:
    """Return True if a counter decreased.

    Arrival counters are ignored, because more arrivals must never look like a restart.
    """
    return (
        after.prompt_tokens < before.prompt_tokens
        or after.cached_prompt_tokens < before.cached_prompt_tokens
        or after.generation_tokens < before.generation_tokens
        or after.finished_requests < before.finished_requests
        or (after.steps or 0.0) < (before.steps or 0.0)
        or (after.busy_seconds or 0.0) < (before.busy_seconds or 0.0)
        or any(_total(new) < _total(old) for old, new in zip(before.histograms, after.histograms, strict=True))
    )


def _total(waits: Histogram | None) -> float:
    return 0.0 if waits is None else waits.total


def _since_restart(sample: ReplicaSample) -> ReplicaSample:
    """Return the counters of an engine that has just started."""
    return ReplicaSample(
        time=sample.time,
        waiting=0.0,
        running=0.0,
        queued_prompt_tokens=0.0,
        kv_tokens_used=0.0,
        kv_tokens_capacity=sample.kv_tokens_capacity,
        arrived_requests=None if sample.arrived_requests is None else 0.0,
        arrived_prompt_tokens=None if sample.arrived_prompt_tokens is None else 0.0,
        steps=None if sample.steps is None else 0.0,
        busy_seconds=None if sample.busy_seconds is None else 0.0,
    )


def _arrivals(before: ReplicaSample, after: ReplicaSample, finished: float) -> float:
    """Return the requests that arrived, or an estimate for an engine that does not count them.

    The estimate is the finished requests plus the growth of the number in progress.
    """
    if before.arrived_requests is not None and after.arrived_requests is not None:
        return max(0.0, after.arrived_requests - before.arrived_requests)
    within = (after.waiting + after.running) - (before.waiting + before.running)
    return max(0.0, finished + within)


def _arrived_tokens(before: ReplicaSample, after: ReplicaSample, computed: float) -> float:
    if before.arrived_prompt_tokens is not None and after.arrived_prompt_tokens is not None:
        return max(0.0, after.arrived_prompt_tokens - before.arrived_prompt_tokens)
    return max(0.0, computed + after.queued_prompt_tokens - before.queued_prompt_tokens)


def _late(before: Histogram | None, after: Histogram | None, threshold: float | None) -> LateCount:
    """Return the number of latencies between two samples, and how many of them were above the threshold."""
    if after is None or threshold is None:
        return LateCount()
    total, late = after.total, share_above(after, threshold)
    if before is not None and before.bounds == after.bounds:
        total, late = total - before.total, late - share_above(before, threshold)
    return LateCount(max(0.0, total), max(0.0, late))


def _work(before: ReplicaSample, after: ReplicaSample, *, prefill_tokens: float, decode_tokens: float) -> Work | None:
    if before.steps is None or after.steps is None or before.busy_seconds is None or after.busy_seconds is None:
        return None
    return Work(
        steps=after.steps - before.steps,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        busy_seconds=after.busy_seconds - before.busy_seconds,
    )
