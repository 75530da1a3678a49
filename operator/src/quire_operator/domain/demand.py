"""How many replicas the demand asks for, term by term; the largest counts.

Under ``autoscaler.decide``. Each term is a number of replicas, not rounded, with the figures it came from in words.
Pure, and monotone: more waiting, running, queued, held or arriving never lowers a term.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_operator.domain.history import FLOW_SECONDS, Flow
from quire_operator.domain.observation import ReplicaSample
from quire_operator.domain.rates import Rates
from quire_operator.domain.scaling_reasons import Reason
from quire_operator.domain.spec.scaling import LatencyTarget, ScalingTargets

TARGET_LOAD = 0.8
"""How full a replica may be by plan: what is left absorbs the next seconds."""
SLO_SECONDS = 30.0
_SLO_HOLD = 0.99
_ACTIVE = 0.01
_ENOUGH_SECONDS = 10.0
"""A mean over less than this says nothing about arrivals."""
_ENOUGH_LATE = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    reason: Reason
    need: float
    """Replicas."""
    detail: str
    """Its numbers, to stand in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """All fresh samples together."""

    replicas: int
    waiting: float
    running: float
    queued_prompt_tokens: float
    kv_tokens_used: float

    @classmethod
    def of(cls, samples: Sequence[ReplicaSample]) -> "Load":
        return cls(
            replicas=len(samples),
            waiting=sum(s.waiting for s in samples),
            running=sum(s.running for s in samples),
            queued_prompt_tokens=sum(s.queued_prompt_tokens for s in samples),
            kv_tokens_used=sum(s.kv_tokens_used for s in samples),
        )


def gauge_terms(
    load: Load, *, rates: Rates | None, kv_tokens: float, max_sequences: int, targets: ScalingTargets
) -> list[Term]:
    """What is at the replicas now."""
    output = rates.mean_output_tokens if rates else 0.0
    growth = output * load.running / 2
    kv = (load.kv_tokens_used + load.queued_prompt_tokens + growth) / (TARGET_LOAD * kv_tokens)
    slots = (load.running + load.waiting) / (TARGET_LOAD * max_sequences)
    terms = [
        Term(
            reason=Reason.KV_DEMAND,
            need=kv,
            detail=f"{load.kv_tokens_used:,.0f} KV tokens in use + {load.queued_prompt_tokens:,.0f} queued + "
            f"{growth:,.0f} still to be generated over {TARGET_LOAD} × {kv_tokens:,.0f} a replica",
        ),
        Term(
            reason=Reason.CONCURRENCY,
            need=slots,
            detail=f"{load.running:.0f} running + {load.waiting:.0f} waiting over {TARGET_LOAD} × {max_sequences} "
            "sequences a replica",
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
                f"{kv_tokens:,.0f} a replica",
            )
        )
    return terms


def work_term(flows: Sequence[Flow], *, rates: Rates | None, max_sequences: int) -> Term | None:
    """What arrived in the last minute, in seconds of a busy replica per second; None while too little is known."""
    seconds = sum(flow.seconds for flow in flows)
    if rates is None or seconds < _ENOUGH_SECONDS:
        return None
    requests = sum(flow.requests for flow in flows) / seconds
    prompt_tokens = sum(flow.prompt_tokens for flow in flows) / seconds
    prefill = prompt_tokens * rates.prefill_seconds_per_token
    decode = requests * rates.mean_output_tokens * rates.seconds_per_output_token(max_sequences)
    return Term(
        reason=Reason.WORK,
        need=(prefill + decode) / TARGET_LOAD,
        detail=f"{requests:.2f} requests/s of {rates.mean_output_tokens:.0f} output tokens and {prompt_tokens:,.0f} "
        f"prompt tokens/s in the last {min(seconds, FLOW_SECONDS):.0f} s are {prefill + decode:.2f} busy replicas, "
        f"over {TARGET_LOAD}",
    )


def first_token_term(flows: Sequence[Flow], *, target: LatencyTarget, replicas: int, now: float) -> Term | None:
    """One replica more, while more first tokens are late than the percentile allows; None while they are not."""
    recent = [flow for flow in flows if flow.time > now - SLO_SECONDS]
    total = sum(flow.first_tokens for flow in recent)
    late = sum(flow.late_first_tokens for flow in recent)
    if late < _ENOUGH_LATE or late <= total * (100 - target.percentile) / 100:
        return None
    return Term(
        reason=Reason.FIRST_TOKEN,
        need=float(replicas + 1),
        detail=f"{late:.0f} of {total:.0f} first tokens in the last {SLO_SECONDS:.0f} s waited over "
        f"{target.threshold_seconds:g} s beyond their own prefill, p{target.percentile} is the target",
    )


def first_token_hold(replicas: int) -> float:
    """What late first tokens count as on the way down: nearly all replicas."""
    return _SLO_HOLD * replicas


def activity_term(arrived: float, in_flight: int) -> Term | None:
    """Next to nothing, but not nothing: whoever asks now and then keeps the last replica."""
    if arrived <= 0 and in_flight <= 0:
        return None
    return Term(
        reason=Reason.ACTIVITY,
        need=_ACTIVE,
        detail=f"{arrived:.0f} requests since the last look, {in_flight} in flight at the gateways",
    )


def held_term(held: int, *, max_sequences: int) -> Term:
    """Requests that wait in the gateway for a first replica."""
    return Term(
        reason=Reason.HELD,
        need=held / (TARGET_LOAD * max_sequences),
        detail=f"{held} requests held by the gateway",
    )
