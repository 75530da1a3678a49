"""The replicas that latency targets require: what was measured against the targets of the spec.

Part of ``autoscaling.decide``, next to ``demand``. More replicas always shorten the time that requests wait, but not
the time that a single prompt or a single step takes. So the targets for whole latencies add replicas only up to a
multiple of what the other signals require, and none at all if a request alone on a replica would miss them. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_common.quantities import format_duration
from quire_operator.api.scaling import ScalingTargets
from quire_operator.autoscaling.demand import Load, Reason, Term, Tuning
from quire_operator.autoscaling.history import Flow, LateCount
from quire_operator.autoscaling.rates import Rates

LATE = frozenset({Reason.FIRST_TOKEN, Reason.TOTAL_FIRST_TOKEN, Reason.TOKEN_GAP})
"""The reasons of terms that exist because a latency target was missed."""
_ENOUGH_LATE = 2.0
_FULL = 0.8
"""The planned share of the batch with which tokens come just in time; prompts in the same steps need the rest."""
_HELPFUL, _FEW = 2.0, 2.0
"""With this many times the replicas that other signals require, and this many more, latencies have another cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """One target for whole latencies, with what was measured."""

    reason: Reason
    field: str
    what: str
    percentile: int
    threshold_seconds: float
    alone_seconds: float
    """The latency of a request of mean size that has a replica for itself; 0 if it is not known."""

    def count(self, flow: Flow) -> LateCount:
        return flow.whole_first_tokens if self.reason is Reason.TOTAL_FIRST_TOKEN else flow.token_gaps

    @property
    def is_possible(self) -> bool:
        return self.alone_seconds <= self.threshold_seconds

    @property
    def text(self) -> str:
        return f"{self.field} {format_duration(self.threshold_seconds)}, p{self.percentile}"


def whole_latency_terms(
    flows: Sequence[Flow],
    *,
    targets: ScalingTargets,
    rates: Rates | None,
    replicas: int,
    need: float,
    tuning: Tuning,
    now: float,
) -> list[Term]:
    """Return a term for each target for whole latencies that is missed; ``need`` is what other signals require.

    It is one replica more, while that helps. The need is 0 for a target that no number of replicas can meet.
    """
    recent = [flow for flow in flows if flow.time > now - tuning.first_token_seconds]
    most = max(_HELPFUL * need, need + _FEW)
    terms: list[Term] = []
    for target in _targets(targets, rates):
        counts = [target.count(flow) for flow in recent]
        total, late = sum(count.total for count in counts), sum(count.late for count in counts)
        if late < _ENOUGH_LATE or late <= total * (100 - target.percentile) / 100:
            continue
        missed = f"{late:.0f} of {total:.0f} {target.what} in the last {tuning.first_token_seconds:.0f} s took over "
        missed += f"{target.threshold_seconds:g} s ({target.text})"
        if not target.is_possible:
            alone = f"{target.alone_seconds:.3g} s without any other request, so no number of replicas meets the target"
            terms.append(Term(reason=target.reason, need=0.0, detail=f"{missed}; they take {alone}"))
        elif replicas + 1 <= most:
            terms.append(Term(reason=target.reason, need=float(replicas + 1), detail=missed))
        else:
            far = f"more than {most:.2f} replicas would not help, because other signals require {need:.2f}"
            terms.append(Term(reason=target.reason, need=min(most, float(replicas)), detail=f"{missed}; {far}"))
    return terms


def batch_term(load: Load, *, targets: ScalingTargets, rates: Rates | None) -> Term | None:
    """Return the replicas with which batches are small enough for ``interTokenLatency``; None if that is unknown."""
    target = targets.inter_token_latency
    if target is None or rates is None or rates.decode_seconds_per_token <= 0:
        return None
    largest = (target.threshold_seconds - rates.step_seconds) / rates.decode_seconds_per_token
    if largest < 1.0:
        return None  # a request alone is slower; ``whole_latency_terms`` says so
    return Term(
        reason=Reason.TOKEN_GAP,
        need=(load.running + load.waiting) / (_FULL * max(largest, 1 / _FULL)),
        detail=f"{load.running:.0f} running + {load.waiting:.0f} waiting over {_FULL} × {largest:.0f}, the batch whose "
        f"steps take {target.threshold_seconds:g} s (interTokenLatency)",
    )


def worst_late(flow: Flow, *, targets: ScalingTargets, rates: Rates | None) -> float:
    """Return how many first tokens count as late: those of the target that is missed most.

    Counts of other targets are converted to the percentile of firstTokenWait, by which they are judged.
    """
    late = flow.late_first_tokens
    for target in _targets(targets, rates):
        count = target.count(flow)
        if count.total > 0 and target.is_possible:
            share = count.late / count.total * (100 - targets.wait.percentile) / (100 - target.percentile)
            late = max(late, min(1.0, share) * flow.first_tokens)
    return late


def _targets(targets: ScalingTargets, rates: Rates | None) -> list[_Target]:
    found: list[_Target] = []
    first, gap = targets.total_time_to_first_token, targets.inter_token_latency
    if first is not None:
        prompt = 0.0 if rates is None else rates.mean_prompt_tokens * rates.prefill_seconds_per_token
        found.append(
            _Target(
                reason=Reason.TOTAL_FIRST_TOKEN,
                field="totalTimeToFirstToken",
                what="first tokens",
                percentile=first.percentile,
                threshold_seconds=first.threshold_seconds,
                alone_seconds=0.0 if rates is None else rates.step_seconds + prompt,
            )
        )
    if gap is not None:
        found.append(
            _Target(
                reason=Reason.TOKEN_GAP,
                field="interTokenLatency",
                what="tokens",
                percentile=gap.percentile,
                threshold_seconds=gap.threshold_seconds,
                alone_seconds=0.0 if rates is None else rates.step_seconds + rates.decode_seconds_per_token,
            )
        )
    return found
