"""The number of replicas that demand requires, by signal; the largest term counts.

Part of ``autoscaling.decide``. Each term is a number of replicas, not rounded, with a text that shows its figures. Pure
and monotone: more waiting, running, queued, held or arriving requests never lower a term.

Also the reasons of decisions and the constants of the policy, which random trials on production traces chose
(docs/autoscaling.md). They are the same for all LLMDeployments; ``spec.autoscaling`` has what users may change.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from quire_common.quantities import format_duration
from quire_operator.api.scaling import LatencyTarget, ScalingTargets
from quire_operator.autoscaling.history import Flow
from quire_operator.autoscaling.observation import ReplicaSample
from quire_operator.autoscaling.ramp import RampEstimator
from quire_operator.autoscaling.rates import Rates
from quire_operator.autoscaling.ttft_correction import TtftCorrection
from quire_operator.autoscaling.variance import Variance


class Reason(StrEnum):
    # Signals that require replicas.
    WORK = "ArrivingWork"
    KV_DEMAND = "KVDemand"
    CONCURRENCY = "Concurrency"
    QUEUE_DEPTH = "QueueDepth"
    KV_USAGE = "KVUsage"
    FIRST_TOKEN = "TimeToFirstToken"
    """firstTokenWait is missed. The word is that of the target's former name, which alerts and dashboards know."""
    TOTAL_FIRST_TOKEN = "TotalTimeToFirstToken"
    TOKEN_GAP = "InterTokenLatency"
    HELD = "HeldRequests"
    ACTIVITY = "Activity"
    # Decisions that do not depend on demand.
    BOUNDS = "OutOfBounds"
    SCHEDULE = "Schedule"
    METRICS_STALE = "MetricsStale"
    NO_GATEWAY = "GatewayUnavailable"
    # Reasons to stay at the current number.
    STEADY = "Steady"
    STARTING = "Starting"
    AT_MAX = "AtMaxReplicas"
    SCALE_UP_WINDOW = "ScaleUpWindow"
    SCALE_UP_LIMIT = "ScaleUpLimit"
    RESTARTED = "Restarted"
    ROLLING_OUT = "RollingOut"
    METRICS_PARTIAL = "MetricsPartial"
    SCALE_DOWN_WINDOW = "ScaleDownWindow"
    SCALE_DOWN_LIMIT = "ScaleDownLimit"
    # Reasons to scale down.
    DEMAND_FELL = "DemandFell"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    spare: float = 0.55
    """Headroom in deviations of the work, times ln(1 / share of answers that may be late)."""
    rise: float = 0.9
    """The same factor for the rise of the work while a replica starts."""
    flow_seconds: float = 60.0
    """The period over which arrivals are averaged."""
    drain_seconds: float = 30.0
    """The time in which a queue should be processed."""
    first_token_seconds: float = 30.0
    """The period over which late first tokens are counted."""

    def spare_replicas(self, deviation: float, rise: float, *, percentile: int) -> float:
        """Return the headroom, in replicas, that keeps ``percentile`` % of the answers in time.

        ``deviation`` is that of the work from its mean, and ``rise`` its rise while a replica starts. The share of
        requests that wait falls exponentially with the headroom, as in square-root staffing (Halfin and Whitt,
        Operations Research 29, 1981). There the √ is the deviation of Poisson arrivals; here the deviation is measured.
        The two are added by their squares, as independent quantities.
        """
        return math.log(100 / (100 - percentile)) * math.hypot(self.spare * deviation, self.rise * rise)


_FULL = 0.8
"""The planned utilization of a replica; the rest absorbs short peaks."""
_STILL_TO_COME = 0.5
"""The share of the mean answer that a running sequence still has to generate."""
_ACTIVE = 0.01
_ENOUGH_SECONDS = 10.0
"""The least period over which a mean says something about arrivals."""
_ENOUGH_LATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    reason: Reason
    need: float
    """A number of replicas, not rounded."""
    detail: str
    """The figures as part of a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The sum of all fresh samples."""

    replicas: int
    waiting: float
    running: float
    queued_prompt_tokens: float
    kv_tokens_used: float

    @classmethod
    def of(cls, samples: Collection[ReplicaSample]) -> "Load":
        waiting = running = queued = used = 0.0
        for sample in samples:
            waiting += sample.waiting
            running += sample.running
            queued += sample.queued_prompt_tokens
            used += sample.kv_tokens_used
        return cls(
            replicas=len(samples), waiting=waiting, running=running, queued_prompt_tokens=queued, kv_tokens_used=used
        )


def gauge_terms(
    load: Load, *, rates: Rates | None, kv_tokens: float, max_sequences: int, targets: ScalingTargets
) -> list[Term]:
    """Return the terms of the load that replicas have now."""
    output = rates.mean_output_tokens if rates else 0.0
    growth = output * load.running * _STILL_TO_COME
    kv = (load.kv_tokens_used + load.queued_prompt_tokens + growth) / (_FULL * kv_tokens)
    slots = (load.running + load.waiting) / (_FULL * max_sequences)
    terms = [
        Term(
            reason=Reason.KV_DEMAND,
            need=kv,
            detail=f"{load.kv_tokens_used:,.0f} KV tokens in use + {load.queued_prompt_tokens:,.0f} queued + "
            f"{growth:,.0f} still to be generated over {_FULL} × {kv_tokens:,.0f} per replica",
        ),
        Term(
            reason=Reason.CONCURRENCY,
            need=slots,
            detail=f"{load.running:.0f} running + {load.waiting:.0f} waiting over {_FULL} × {max_sequences} "
            "sequences per replica",
        ),
    ]
    if targets.queue_depth is not None:
        terms.append(
            Term(
                reason=Reason.QUEUE_DEPTH,
                need=load.waiting / targets.queue_depth,
                detail=f"{load.waiting:.0f} waiting over queueDepth {targets.queue_depth}",
            )
        )
    if targets.kv_usage_percent is not None:
        terms.append(
            Term(
                reason=Reason.KV_USAGE,
                need=load.kv_tokens_used / (targets.kv_usage_percent / 100 * kv_tokens),
                detail=f"{load.kv_tokens_used:,.0f} KV tokens in use over kvUsagePercent {targets.kv_usage_percent} of "
                f"{kv_tokens:,.0f} per replica",
            )
        )
    return terms


def work_term(
    flows: Sequence[Flow],
    variance: Variance,
    ramp: RampEstimator,
    *,
    start_up: float,
    queued_prompt_tokens: float,
    rates: Rates | None,
    max_sequences: int,
    percentile: int,
    tuning: Tuning,
) -> Term | None:
    """Return the term of the recently arrived work, or None if too little is known.

    It is the work in busy replicas, plus headroom for its variance and for its rise while a replica starts, plus the
    replicas that process the queue.
    """
    seconds = sum(flow.seconds for flow in flows)
    if rates is None or seconds < _ENOUGH_SECONDS:
        return None
    busy = busy_replicas(flows, rates, max_sequences)
    # Without arrivals nothing more is expected; the window remembers earlier demand.
    deviation = variance.deviation(busy) if busy > 0 else 0.0
    rise = ramp.deviation(busy, start_up=start_up) if busy > 0 else 0.0
    spare = tuning.spare_replicas(deviation, rise, percentile=percentile)
    if busy + spare > busy / _FULL:
        need = busy + spare
        why = (
            f"{busy:.2f} busy replicas + {spare:.2f} headroom (p{percentile}; deviation {deviation:.2f}, "
            f"ramp {rise:.2f} over {start_up:.0f} s start-up)"
        )
    else:
        need = busy / _FULL
        why = f"{busy:.2f} busy replicas, over {_FULL}"
    backlog = queued_prompt_tokens * rates.prefill_seconds_per_token / tuning.drain_seconds
    if backlog > 0:
        why += (
            f", and {backlog:.2f} to process {queued_prompt_tokens:,.0f} queued tokens in {tuning.drain_seconds:.0f} s"
        )
    requests, tokens = sum(f.requests for f in flows) / seconds, sum(f.prompt_tokens for f in flows) / seconds
    return Term(
        reason=Reason.WORK,
        need=need + backlog,
        detail=f"{requests:.2f} requests/s of {rates.mean_output_tokens:.0f} output tokens and {tokens:,.0f} "
        f"prompt tokens/s in the last {seconds:.0f} s are {why}",
    )


def busy_replicas(flows: Sequence[Flow], rates: Rates, max_sequences: int) -> float:
    """Return the busy replicas per second that arrived per second, that is their number."""
    requests, tokens = sum(flow.requests for flow in flows), sum(flow.prompt_tokens for flow in flows)
    decode = rates.mean_output_tokens * rates.seconds_per_output_token(max_sequences)
    return (tokens * rates.prefill_seconds_per_token + requests * decode) / sum(flow.seconds for flow in flows)


def with_ttft_correction(work: Term, ttft_correction: TtftCorrection, *, now: float) -> Term:
    if ttft_correction.factor <= 1.0:
        return work
    ago = format_duration(round(now - ttft_correction.learnt))
    replicas = ttft_correction.replicas
    why = f"× {ttft_correction.factor:.2f} because first tokens were late with {replicas} replicas {ago} ago"
    return replace(work, need=work.need * ttft_correction.factor, detail=f"{work.detail}; {why}")


def first_token_term(
    flows: Sequence[Flow], *, target: LatencyTarget, replicas: int, tuning: Tuning, now: float
) -> Term | None:
    """Return one replica more if more first tokens are late than the percentile allows, else None."""
    recent = [flow for flow in flows if flow.time > now - tuning.first_token_seconds]
    total = sum(flow.first_tokens for flow in recent)
    late = sum(flow.late_first_tokens for flow in recent)
    if late < _ENOUGH_LATE or late <= total * (100 - target.percentile) / 100:
        return None
    return Term(
        reason=Reason.FIRST_TOKEN,
        need=float(replicas + 1),
        detail=f"{late:.0f} of {total:.0f} first tokens in the last {tuning.first_token_seconds:.0f} s waited over "
        f"{target.threshold_seconds:g} s beyond their own prefill (target p{target.percentile})",
    )


def activity_term(arrived: float, in_flight: int) -> Term | None:
    """Return a term that is tiny but positive if there was any request, so that the last replica stays; else None."""
    if arrived <= 0 and in_flight <= 0:
        return None
    return Term(
        reason=Reason.ACTIVITY,
        need=_ACTIVE,
        detail=f"{arrived:.0f} requests since the last tick, {in_flight} in flight at the gateways",
    )


def held_term(held: int, *, max_sequences: int) -> Term:
    """Return the term of the requests that gateways hold for a first replica."""
    return Term(reason=Reason.HELD, need=held / (_FULL * max_sequences), detail=f"{held} requests held by the gateway")
