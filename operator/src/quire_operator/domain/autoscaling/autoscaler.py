"""The autoscaling policy: ``decide(policy, observation, history, now) -> Decision``, a function of values.

``autoscale`` calls it once a tick, in the cluster, in local mode and in the simulator alike. It knows neither
Kubernetes nor the source of the metrics. Its stages are: the facts of the tick (``decision_context``: ``supply``,
``flow``, ``rates``), what demand requires (``demand``), and what windows and steps allow (``limits``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_operator.domain.autoscaling import demand
from quire_operator.domain.autoscaling.decision_context import DecisionContext, Policy, decision_context
from quire_operator.domain.autoscaling.decision_rules import DecisionInputs, Demand, ReplicaChoice, judge
from quire_operator.domain.autoscaling.demand import Term
from quire_operator.domain.autoscaling.history import Change, History, Move, Need, ScalingRecord
from quire_operator.domain.autoscaling.latency_terms import LATE, batch_term, whole_latency_terms
from quire_operator.domain.autoscaling.limits import kept_moves, kept_needs, whole
from quire_operator.domain.autoscaling.observation import Observation
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.autoscaling.ttft_correction import TtftCorrection

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
    """Decide one tick of one LLMDeployment."""
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
