"""The autoscaling policy: ``decide(policy, observation, history, now) -> Decision``, a function of values.

It knows neither Kubernetes nor the source of the metrics. Its stages are: the facts of the tick (``decision_context``:
``supply``, ``flow``, ``rates``), what demand requires (``demand``), and what windows and steps allow (``limits``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from quire_common.quantities import format_duration
from quire_operator.api.scaling import Autoscaling
from quire_operator.api.scaling_limits import PolicyType, ScaleDown, ScaleUp, SelectPolicy, StepLimits, StepPolicy
from quire_operator.autoscaling import demand
from quire_operator.autoscaling.decision_context import DecisionContext, Policy, decision_context
from quire_operator.autoscaling.demand import Reason, Term
from quire_operator.autoscaling.history import Change, History, Move, Need, ScalingRecord
from quire_operator.autoscaling.latency_terms import LATE, batch_term, whole_latency_terms
from quire_operator.autoscaling.observation import Observation
from quire_operator.autoscaling.schedules import Bounds, recorded_bounds
from quire_operator.autoscaling.supply import SAMPLE_SECONDS, Supply
from quire_operator.autoscaling.ttft_correction import TtftCorrection

_EPSILON = 1e-9


def whole(need: float) -> int:
    """Return the whole number of replicas for a need; a rounding error adds none."""
    return math.ceil(need - _EPSILON)


def kept_needs(needs: Sequence[Need], *, rules: Autoscaling, now: float) -> tuple[Need, ...]:
    """Return the needs in the longer window, and the last one before it, which shows that the window is complete."""
    start = now - max(rules.scale_up.window_seconds, rules.scale_down.window_seconds)
    inside = [need for need in needs if need.time > start]
    before = [need for need in needs if need.time <= start]
    return (*before[-1:], *inside)


def kept_moves(moves: Sequence[Move], *, rules: Autoscaling, now: float) -> tuple[Move, ...]:
    """Return the moves that a step limit still counts."""
    period = max(rules.scale_up.longest_period_seconds, rules.scale_down.longest_period_seconds)
    return tuple(move for move in moves if move.time > now - period)


def steady_need_up(needs: Sequence[Need], *, rules: ScaleUp, now: float) -> float:
    """Return the need during the whole window."""
    return min(need.up for need in needs if need.time >= now - rules.window_seconds)


def highest_need(needs: Sequence[Need], key: Callable[[Need], float], *, rules: ScaleDown, now: float) -> Need:
    """Return the need within the window whose number of replicas, which ``key`` returns, is the largest."""
    return max((need for need in needs if need.time >= now - rules.window_seconds), key=key)


def is_watched(needs: Sequence[Need], *, rules: ScaleDown, now: float) -> bool:
    """Return True if demand is known for the whole window."""
    return bool(needs) and needs[0].time <= now - rules.window_seconds


def most_allowed(current: int, moves: Sequence[Move], *, rules: ScaleUp, now: float) -> int:
    """Return the most replicas that the step limits allow now."""
    if rules.select is SelectPolicy.DISABLED:
        return current
    choose = max if rules.select is SelectPolicy.MAX else min
    return max(current, choose(_raised(current, moves, policy, now) for policy in rules.policies))


def fewest_allowed(current: int, moves: Sequence[Move], *, rules: ScaleDown, now: float) -> int:
    """Return the fewest replicas that the step limits allow now."""
    if rules.select is SelectPolicy.DISABLED:
        return current
    choose = min if rules.select is SelectPolicy.MAX else max
    return min(current, max(0, choose(_lowered(current, moves, policy, now) for policy in rules.policies)))


def _raised(current: int, moves: Sequence[Move], policy: StepPolicy, now: float) -> int:
    recent = (move for move in moves if move.time > now - policy.period_seconds)
    start = max(0, current - sum(max(0, move.to_replicas - move.from_replicas) for move in recent))
    return start + (policy.value if policy.type is PolicyType.PODS else math.ceil(start * policy.value / 100))


def _lowered(current: int, moves: Sequence[Move], policy: StepPolicy, now: float) -> int:
    recent = (move for move in moves if move.time > now - policy.period_seconds)
    start = current + sum(max(0, move.from_replicas - move.to_replicas) for move in recent)
    # As an HPA rounds: the replicas that remain, down.
    return start - policy.value if policy.type is PolicyType.PODS else start * max(0, 100 - policy.value) // 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    terms: tuple[Term, ...]
    need: Need

    @property
    def top(self) -> Term | None:
        return max(self.terms, key=lambda term: term.need, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionInputs:
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


_SURELY_ENOUGH = 1.02
"""The factor on the need of the arriving work for scale-down. The learned costs shift a little with the number of
replicas that share a steady load; without a margin, a need close to a whole number would remove a replica and add it
again, without end.
"""
_TOO_FEW = 0.99
"""The need that late first tokens count as for scale-down, as a share of the current replicas."""
_NOT_ENOUGH = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A number of replicas, the reason for it, and the history for the next tick."""

    time: float
    current: int
    desired: int
    reason: Reason
    message: str
    """One sentence with the figures."""
    inputs: Mapping[str, float]
    terms: tuple[Term, ...]
    """The demand of each signal; empty if there are no metrics."""
    victims: tuple[str, ...]
    """The replicas to remove in a scale-down, in order of the least loss."""
    enforced: bool
    """False in mode Recommend: the decision is reported but not applied."""
    bounds: tuple[int, int]
    """The minimum and maximum number of replicas."""
    oldest_sample: float | None
    """The time of the oldest among the newest samples of the ready replicas; None without samples."""
    history: History

    @property
    def is_change(self) -> bool:
        return self.desired != self.current

    @property
    def record(self) -> ScalingRecord:
        """The record to persist before the decision is applied."""
        return self.history.record


def decide(policy: Policy, observation: Observation, history: History, now: float) -> Decision:
    # By the record as it was persisted: the reconciler, which reads that, must find the same bounds.
    bounds = recorded_bounds(policy.autoscaling, history.record, now)
    rules = policy.autoscaling.within(bounds.min_replicas, bounds.max_replicas)
    context = decision_context(policy, rules, observation, history, now)
    demanded = _demand(context)
    history = replace(
        context.history,
        needs=kept_needs((*context.history.needs, demanded.need), rules=context.rules, now=now),
        ttft_correction=_ttft_correction(context, demanded),
        idle_since=_idle_since(context, demanded),
    )
    context = replace(context, history=history)
    choice = judge(
        DecisionInputs(
            rules=context.rules,
            bounds=bounds,
            supply=context.supply,
            demand=demanded,
            needs=history.needs,
            moves=history.moves,
            rolling_out=observation.rolling_out,
            is_first=context.is_first,
            held=observation.held_requests,
            in_flight=observation.in_flight_requests,
            recommended=None if context.is_enforced else history.record.desired_replicas,
            idle_since=history.idle_since,
            now=now,
        )
    )
    inputs = _inputs(context, demanded)
    current = context.supply.current
    return Decision(
        time=now,
        current=current,
        desired=choice.desired,
        reason=choice.reason,
        message=choice.message,
        inputs=inputs,
        terms=demanded.terms,
        victims=context.supply.victims(current - choice.desired) if choice.desired < current else (),
        enforced=context.is_enforced,
        bounds=(context.rules.min_replicas, context.rules.max_replicas),
        oldest_sample=context.supply.oldest_sample,
        history=_history_after(context, choice, inputs),
    )


# --- history ---


def _idle_since(context: DecisionContext, demanded: Demand) -> float | None:
    """Return the time since when no replica is needed and no gateway has a request; None if one is needed."""
    is_needed = whole(demanded.need.down) > 0 or bool(context.observation.in_flight_requests)
    if is_needed or bool(context.observation.held_requests):
        return None
    return context.history.idle_since if context.history.idle_since is not None else context.now


def _ttft_correction(context: DecisionContext, demanded: Demand) -> TtftCorrection:
    """Return the correction, raised if first tokens are late although the work should fit."""
    needs = {term.reason: term.need for term in demanded.terms}
    ttft_correction = context.history.ttft_correction.needed(needs.get(Reason.WORK, 0.0), seconds=context.seconds)
    if not any(needs.get(reason, 0.0) > context.supply.current for reason in LATE):
        return ttft_correction
    return ttft_correction.raised(
        replicas=context.supply.current,
        waiting=context.load.waiting,
        percentile=context.rules.targets.wait.percentile,
        now=context.now,
    )


def _history_after(context: DecisionContext, choice: ReplicaChoice, inputs: Mapping[str, float]) -> History:
    """Return the history with the decision recorded, and with a move if the decision is applied."""
    history, current, now = context.history, context.supply.current, context.now
    record = history.record.with_rates(context.rates, now).with_start_up(history.start_ups.learnt)
    moves = history.moves
    if choice.desired == current:
        record = replace(record, desired_replicas=current)
    else:
        change = Change(
            time=now,
            from_replicas=current,
            to_replicas=choice.desired,
            reason=choice.reason,
            message=choice.message,
            inputs=inputs,
        )
        record = record.with_change(change)
        if context.is_enforced:
            moves = (*moves, Move(time=now, from_replicas=current, to_replicas=choice.desired))
    return replace(history, record=record, rates=context.rates, moves=kept_moves(moves, rules=context.rules, now=now))


# --- demand ---


def _demand(context: DecisionContext) -> Demand:
    """Return the number of replicas that demand requires, and the term of each signal."""
    supply, tuning, now = context.supply, context.tuning, context.now
    if supply.is_stale:
        return Demand(terms=(), need=Need(time=now, up=0.0, down=float(supply.current)))
    terms = _terms(context)
    need = max((term.need for term in terms), default=0.0)
    needs_down = (term.need * (_SURELY_ENOUGH if term.reason is Reason.WORK else 1.0) for term in terms)
    down = max(needs_down, default=0.0) + supply.starting + supply.missing
    late = _late_terms(context, need)
    if any(term.need > supply.current for term in late):
        down = max(down, _TOO_FEW * supply.current)
    settled_since = context.history.settled_since
    if late and settled_since is not None and now - settled_since >= tuning.first_token_seconds:
        terms += late
        most = max(term.need for term in late)
        need = max(need, most)
        # The additional replica must not be removed at once: the current number was not enough.
        down = max(down, supply.current + _NOT_ENOUGH if most > supply.current else most)
    return Demand(terms=tuple(terms), need=Need(time=now, up=need, down=down))


def _late_terms(context: DecisionContext, need: float) -> list[Term]:
    """Return a term for each latency target that was missed; ``need`` is what the other signals require."""
    targets, replicas, flows = context.rules.targets, context.supply.current, context.history.flows
    wait = demand.first_token_term(
        flows, target=targets.wait, replicas=replicas, tuning=context.tuning, now=context.now
    )
    whole = whole_latency_terms(
        flows,
        targets=targets,
        rates=context.rates,
        replicas=replicas,
        need=need,
        tuning=context.tuning,
        now=context.now,
    )
    return whole if wait is None else [wait, *whole]


def _terms(context: DecisionContext) -> list[Term]:
    """Return the terms of all signals with metrics, except late first tokens."""
    policy, history, load, observation = context.policy, context.history, context.load, context.observation
    terms: list[Term] = []
    if context.supply.fresh:
        terms += demand.gauge_terms(
            load,
            rates=context.rates,
            kv_tokens=context.kv_tokens_per_replica,
            max_sequences=policy.max_sequences,
            targets=context.rules.targets,
        )
        batch = batch_term(load, targets=context.rules.targets, rates=context.rates)
        terms += [] if batch is None else [batch]
    work = demand.work_term(
        context.recent_flows,
        history.variance,
        history.ramp,
        start_up=history.start_ups.usual,
        queued_prompt_tokens=load.queued_prompt_tokens,
        rates=context.rates,
        max_sequences=policy.max_sequences,
        percentile=context.rules.targets.wait.percentile,
        tuning=context.tuning,
    )
    if work is not None:
        terms.append(demand.with_ttft_correction(work, history.ttft_correction, now=context.now))
    if observation.held_requests is not None:
        terms.append(demand.held_term(observation.held_requests, max_sequences=policy.max_sequences))
    if context.supply.current > 0:
        # Without replicas, requests in flight are with a draining replica and need no other one.
        arrived = history.flows[-1].requests if history.flows else 0.0
        active = demand.activity_term(arrived, observation.in_flight_requests or 0)
        terms += [] if active is None else [active]
    return terms


def _inputs(context: DecisionContext, demanded: Demand) -> dict[str, float]:
    """Return the figures that explain the decision, as status and ``quire explain`` show them."""
    supply, load, observation = context.supply, context.load, context.observation
    inputs: dict[str, float] = {
        "replicas": supply.current,
        "ready": supply.ready,
        "starting": supply.starting,
        "fresh": len(supply.fresh),
        "waiting": load.waiting,
        "running": load.running,
        "queuedPromptTokens": load.queued_prompt_tokens,
        "kvTokensUsed": load.kv_tokens_used,
        "needUp": demanded.need.up,
        "needDown": demanded.need.down,
        "startUpSeconds": context.history.start_ups.usual,
    }
    if observation.held_requests is not None:
        inputs["heldRequests"] = observation.held_requests
    if observation.in_flight_requests is not None:
        inputs["inFlightRequests"] = observation.in_flight_requests
    inputs |= {f"need{term.reason.value}": term.need for term in demanded.terms}
    return {name: round(value, 3) for name, value in inputs.items()}
