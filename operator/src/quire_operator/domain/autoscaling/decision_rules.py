"""The rules that turn demand into a decision: bounds, windows and step limits, with the reason in one sentence.

It is the last stage of ``autoscaler.decide``. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from quire_common.quantities import format_duration
from quire_operator.domain.autoscaling.demand import Term
from quire_operator.domain.autoscaling.history import Move, Need
from quire_operator.domain.autoscaling.limits import (
    fewest_allowed,
    highest_need,
    is_watched,
    most_allowed,
    steady_need_up,
    whole,
)
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.schedules import Bounds
from quire_operator.domain.autoscaling.supply import SAMPLE_SECONDS, Supply
from quire_operator.domain.resource.scaling import Autoscaling
from quire_operator.domain.resource.scaling_limits import SelectPolicy, StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of one tick."""

    terms: tuple[Term, ...]
    need: Need

    @property
    def top(self) -> Term | None:
        return max(self.terms, key=lambda term: term.need, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
    """All inputs of one decision."""

    rules: Autoscaling
    """With the bounds of now."""
    bounds: Bounds
    supply: Supply
    demand: Demand
    needs: Sequence[Need]
    """The needs within the windows; the last one is of this tick."""
    moves: Sequence[Move]
    rolling_out: bool
    is_first: bool
    """True for the first tick of this process, which knows nothing of earlier demand."""
    held: int | None
    """The requests that wait in the gateways; None if no gateway answered."""
    in_flight: int | None
    """The requests that gateways have sent to replicas; None unless all gateways answered."""
    recommended: int | None
    """The last recommendation; None if decisions are applied."""
    idle_since: float | None
    """The time since when no replica is needed; None while one is."""
    now: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChoice:
    desired: int
    reason: Reason
    message: str


def judge(s: DecisionInputs) -> ReplicaChoice:
    """Return what to do or, in mode Recommend, what to recommend."""
    choice = _judge(s)
    if s.recommended is None or not max(s.supply.current, choice.desired) < s.recommended <= s.rules.max_replicas:
        return choice
    return _recommended(s, choice, s.recommended)


def _judge(s: DecisionInputs) -> ReplicaChoice:
    """Return the choice: bounds need no metrics, then hold without metrics, then up at once, then down slowly."""
    current = s.supply.current
    bounded = max(s.rules.min_replicas, min(current, s.rules.max_replicas))
    if bounded != current:
        bounds = f"minReplicas {s.rules.min_replicas} to maxReplicas {s.rules.max_replicas}"
        why = s.bounds.why
        if why is not None:
            return _change(s, bounded, Reason.SCHEDULE, f"{current} is outside {bounds}: {why}")
        return _change(s, bounded, Reason.BOUNDS, f"{current} is outside {bounds}")
    if s.supply.is_stale:
        return _hold(s, Reason.METRICS_STALE, _missing(s))
    if current == 0 and s.held is None:
        return _hold(s, Reason.NO_GATEWAY, _missing(s))
    if whole(s.demand.need.up) > current:
        return _upward(s)
    if current == s.rules.min_replicas or whole(s.demand.need.down) > current - 1:
        return _steady(s)
    return _downward(s)


def _steady(s: DecisionInputs) -> ReplicaChoice:
    """Return the choice to stay, and whether missing metrics cause it: a lower demand would not explain the number."""
    current = s.supply.current
    if s.supply.starting:
        return _hold(s, Reason.STARTING, _needs(s))
    if s.supply.missing and current > s.rules.min_replicas and whole(s.demand.need.up) < current:
        return _hold(s, Reason.METRICS_PARTIAL, f"{_silent(s)}, and may be full; {_needs(s)}")
    why = s.bounds.why
    if why is not None and current == s.rules.min_replicas and whole(s.demand.need.down) < current:
        return _hold(s, Reason.SCHEDULE, f"minReplicas is {current}: {why}; {_needs(s)}")
    return _hold(s, Reason.STEADY, _needs(s))


def _upward(s: DecisionInputs) -> ReplicaChoice:
    current, limits = s.supply.current, s.rules.scale_up
    if current == s.rules.max_replicas:
        schedule = "" if s.bounds.why is None else f" ({s.bounds.why})"
        return _hold(s, Reason.AT_MAX, f"maxReplicas is {current}{schedule}; {_needs(s)}")
    # The first replica has neither window nor step limit, because requests wait for it.
    first = 1 if current == 0 else 0
    wanted = max(first, whole(steady_need_up(s.needs, rules=limits, now=s.now)))
    if wanted <= current:
        window = format_duration(limits.window_seconds)
        return _hold(s, Reason.SCALE_UP_WINDOW, f"not needed during the whole of the last {window}; {_needs(s)}")
    most = min(s.rules.max_replicas, max(first, most_allowed(current, s.moves, rules=limits, now=s.now)))
    if most == current:
        return _hold(s, Reason.SCALE_UP_LIMIT, f"scaleUp allows {_allowed(limits)}; {_needs(s)}")
    top = s.demand.top
    assert top is not None, "a need above zero has a term"
    return _change(s, min(wanted, most), top.reason, _needs(s))


def _downward(s: DecisionInputs) -> ReplicaChoice:
    current, limits = s.supply.current, s.rules.scale_down
    obstacle = _obstacle_down(s)
    if obstacle is not None:
        return _hold(s, obstacle[0], f"{obstacle[1]}; {_needs(s)}")
    window = format_duration(limits.window_seconds)
    highest = highest_need(s.needs, lambda need: need.down, rules=limits, now=s.now)
    if whole(highest.down) > current - 1:
        when = f"{highest.down:.2f} replicas were needed {format_duration(round(s.now - highest.time))} ago"
        return _hold(s, Reason.SCALE_DOWN_WINDOW, f"{when}, within {window}; {_needs(s)}")
    fewest = max(s.rules.min_replicas, fewest_allowed(current, s.moves, rules=limits, now=s.now))
    if fewest == current:
        return _hold(s, Reason.SCALE_DOWN_LIMIT, f"scaleDown allows {_allowed(limits)}; {_needs(s)}")
    least = max(fewest, whole(highest.down))
    idle = 0.0 if s.idle_since is None else s.now - s.idle_since
    if least == 0 and idle < (after := s.rules.scale_to_zero.after_seconds):
        if current == 1:
            passed = f"no request for {format_duration(round(idle))}, and scaleToZero.after is {format_duration(after)}"
            return _hold(s, Reason.SCALE_DOWN_WINDOW, f"the last replica stays: {passed}; {_needs(s)}")
        least = 1
    if least == 0 and s.in_flight is None:
        # No gateway would hold the next request, and requests in progress might be unknown.
        if current == 1:
            return _hold(s, Reason.NO_GATEWAY, f"the last replica stays until all gateways answer; {_needs(s)}")
        least = 1
    why = f"at most {highest.down:.2f} replicas were needed in the last {window}; {_needs(s)}"
    return _change(s, least, Reason.DEMAND_FELL, why)


def _recommended(s: DecisionInputs, choice: ReplicaChoice, before: int) -> ReplicaChoice:
    """Return the choice after a larger recommendation, which decreases as slowly as replicas do."""
    current, limits = s.supply.current, s.rules.scale_down
    if choice.reason in (Reason.METRICS_STALE, Reason.NO_GATEWAY):
        return ReplicaChoice(
            desired=before, reason=choice.reason, message=f"{current} → {before} as before: {_missing(s)}"
        )
    if not is_watched(s.needs, rules=limits, now=s.now):
        return _change(s, before, Reason.SCALE_DOWN_WINDOW, f"as recommended before; {_needs(s)}")
    # Missing replicas count as empty here.
    highest = highest_need(s.needs, lambda need: need.up, rules=limits, now=s.now)
    least = min(before, whole(highest.up))
    if least <= max(current, choice.desired):
        return choice
    when = f"{highest.up:.2f} replicas were needed {format_duration(round(s.now - highest.time))} ago"
    return _change(s, least, Reason.SCALE_DOWN_WINDOW, f"{when}, within {format_duration(limits.window_seconds)}")


def _obstacle_down(s: DecisionInputs) -> tuple[Reason, str] | None:
    """Return the reason why no replica may be removed now, whatever the demand, or None."""
    if s.is_first:
        return Reason.RESTARTED, "scale-down is disabled at the first tick after a restart"
    if s.rolling_out:
        return Reason.ROLLING_OUT, "scale-down is disabled during a rollout"
    if s.supply.missing:
        return Reason.METRICS_PARTIAL, _silent(s)
    if not is_watched(s.needs, rules=s.rules.scale_down, now=s.now):
        window = format_duration(s.rules.scale_down.window_seconds)
        return Reason.SCALE_DOWN_WINDOW, f"demand has not been observed for {window} yet"
    return None


def _allowed(limits: StepLimits) -> str:
    return "no change" if limits.select is SelectPolicy.DISABLED else f"at most {limits}"


def _change(s: DecisionInputs, desired: int, reason: Reason, why: str) -> ReplicaChoice:
    return ReplicaChoice(desired=desired, reason=reason, message=f"{s.supply.current} → {desired}: {why}")


def _hold(s: DecisionInputs, reason: Reason, why: str) -> ReplicaChoice:
    return ReplicaChoice(desired=s.supply.current, reason=reason, message=f"stays at {s.supply.current}: {why}")


def _silent(s: DecisionInputs) -> str:
    return f"{s.supply.missing} of {s.supply.ready} ready replicas reported no metrics"


def _missing(s: DecisionInputs) -> str:
    """Return which metrics are missing."""
    if s.supply.is_stale:
        fresh = f"only {len(s.supply.fresh)} of {s.supply.ready} ready replicas reported metrics"
        return f"{fresh} in the last {SAMPLE_SECONDS:.0f} s"
    return "no gateway reports whether requests are held"


def _needs(s: DecisionInputs) -> str:
    """Return the largest term with its figures."""
    supply, top = s.supply, s.demand.top
    starting = f", {supply.starting} of {supply.current} still starting" if supply.starting else ""
    if top is None:
        return f"no replica is ready{starting}"
    if top.need == 0:
        return f"no requests run, wait or arrive{starting}"
    return f"{top.reason.value} needs {top.need:.2f} replicas ({top.detail}){starting}"
