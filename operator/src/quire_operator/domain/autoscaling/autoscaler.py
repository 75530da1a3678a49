"""The autoscaling policy: ``decide(policy, observation, history, now) -> Decision``, a function of values.

``autoscale`` calls it once a tick, in the cluster, in local mode and in the simulator alike. It knows neither
Kubernetes nor the source of the metrics. Its stages are: which samples can be trusted (``supply``), what happened since
the last tick (``flow``) and what that teaches (``rates``), what demand requires (``demand``), and what windows and
steps allow (``limits``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.autoscaling import demand
from quire_operator.domain.autoscaling.decision_rules import DecisionInputs, Demand, ReplicaChoice, judge
from quire_operator.domain.autoscaling.demand import Load, Term
from quire_operator.domain.autoscaling.flow import Increment, Thresholds, flow, increment, learnt
from quire_operator.domain.autoscaling.history import Change, Flow, History, Move, Need, ScalingRecord
from quire_operator.domain.autoscaling.latency_terms import LATE, batch_term, whole_latency_terms, worst_late
from quire_operator.domain.autoscaling.limits import kept_moves, kept_needs, whole
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample, without_duplicates
from quire_operator.domain.autoscaling.rates import Rates
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.schedules import recorded_bounds
from quire_operator.domain.autoscaling.supply import Supply, known_samples, take_stock
from quire_operator.domain.autoscaling.ttft_correction import TtftCorrection
from quire_operator.domain.autoscaling.tuning import Tuning
from quire_operator.domain.resource.deployment import Spec
from quire_operator.domain.resource.scaling import Autoscaling, AutoscalingMode

_SURELY_ENOUGH = 1.02
"""The factor on the need of the arriving work for scale-down. The learned costs shift a little with the number of
replicas that share a steady load; without a margin, a need close to a whole number would remove a replica and add it
again, without end.
"""
_TOO_FEW = 0.99
"""The need that late first tokens count as for scale-down, as a share of the current replicas."""
_NOT_ENOUGH = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules of a spec that the decision depends on: ``spec.autoscaling`` and limits of the engine."""

    autoscaling: Autoscaling
    max_sequences: int
    """The number of sequences that one replica runs at once."""
    tuning: Tuning = Tuning()

    @classmethod
    def of(cls, spec: Spec) -> "Policy | None":
        """Return the policy of a spec, or None if the spec has a fixed number of replicas."""
        if spec.autoscaling is None:
            return None
        return cls(autoscaling=spec.autoscaling, max_sequences=spec.engine.max_sequences)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionContext:
    """The facts on which one decision is based. ``history`` already contains the samples and flow of this tick."""

    policy: Policy
    rules: Autoscaling
    """The rules of the policy, with the bounds of this time."""
    observation: Observation
    supply: Supply
    load: Load
    """The load of the replicas with fresh samples."""
    history: History
    rates: Rates | None
    """The rates that this process learned, else the persisted ones; None before anything was learned."""
    is_first: bool
    """True for the first tick of this process."""
    seconds: float
    """The time since the last tick; 0 for the first one."""
    now: float

    @property
    def tuning(self) -> Tuning:
        return self.policy.tuning

    @property
    def is_enforced(self) -> bool:
        return self.rules.mode is AutoscalingMode.ENFORCE

    @property
    def recent_flows(self) -> Sequence[Flow]:
        """The flows over which arrivals are averaged."""
        return [flow for flow in self.history.flows if flow.time > self.now - self.tuning.flow_seconds]

    @property
    def kv_tokens_per_replica(self) -> float:
        return sum(sample.kv_tokens_capacity for sample in self.supply.fresh.values()) / self.load.replicas


def decide(policy: Policy, observation: Observation, history: History, now: float) -> Decision:
    """Decide one tick of one LLMDeployment."""
    # By the record as it was persisted: the reconciler, which reads that, must find the same bounds.
    bounds = recorded_bounds(policy.autoscaling, history.record, now)
    rules = policy.autoscaling.within(bounds.min_replicas, bounds.max_replicas)
    context = _context(policy, rules, observation, history, now)
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


def _context(
    policy: Policy, rules: Autoscaling, observation: Observation, history: History, now: float
) -> DecisionContext:
    """Return the facts of this tick, with its samples, flow and start-ups in the history."""
    history = history.forgetting_gaps(now).by_the_clock(now)
    known = known_samples(observation, history.samples)
    supply = take_stock(observation, known, now)
    with_flow = _with_flow(history, known, supply, policy, now)
    context = DecisionContext(
        policy=policy,
        rules=rules,
        observation=observation,
        supply=supply,
        load=Load.of(supply.fresh.values()),
        history=with_flow,
        rates=_rates(with_flow, known),
        is_first=history.last_tick is None,
        seconds=0.0 if history.last_tick is None else now - history.last_tick,
        now=now,
    )
    return replace(context, history=_with_observed_work(context))


def _with_flow(
    history: History, known: Mapping[str, ReplicaSample], supply: Supply, policy: Policy, now: float
) -> History:
    """Return the history with the samples of this tick and the flow since the last one."""
    targets = policy.autoscaling.targets
    thresholds = Thresholds.of(targets)
    remembered = max(policy.tuning.flow_seconds, policy.tuning.first_token_seconds)
    increments: list[Increment] = [
        increment(before, after, thresholds)
        for name, after in known.items()
        if (before := history.samples.get(name)) is not None and before.time < after.time
    ]
    flows, ttft_correction = history.flows, history.ttft_correction
    if increments and history.last_tick is not None and now > history.last_tick:
        # The period starts at the last sample of any replica, not at the last tick, so that missed samples look like no
        # burst.
        since = flows[-1].time if flows else history.last_tick
        latest = flow(increments, seconds=now - since, now=now)
        flows = (*flows, latest)
        late = worst_late(latest, targets=targets, rates=history.rates)
        ttft_correction = ttft_correction.seen(
            first_tokens=latest.first_tokens, late=late, seconds=latest.seconds, now=now
        )
    flows = tuple(f for f in flows if f.time > now - remembered)
    settled = None if supply.starting else (history.settled_since if history.settled_since is not None else now)
    return replace(
        history,
        last_tick=now,
        settled_since=settled,
        flows=flows,
        ttft_correction=ttft_correction,
        samples=known,
        evidence=learnt(history.evidence, increments),
    )


def _rates(history: History, known: Mapping[str, ReplicaSample]) -> Rates | None:
    """Return the rates that this process learned, else the persisted ones."""
    if not known:
        return history.rates
    kv_tokens = sum(sample.kv_tokens_capacity for sample in known.values()) / len(known)
    return history.evidence.rates(kv_tokens=kv_tokens, before=history.rates) or history.rates


def _with_observed_work(context: DecisionContext) -> History:
    """Return the history with the observed start-ups and, if there are new samples, the work of this tick."""
    history, rates, now = context.history, context.rates, context.now
    start_ups = history.start_ups.seen(
        without_duplicates(context.observation.replicas), is_first=context.is_first, now=now
    )
    history = replace(history, start_ups=start_ups)
    if rates is None or not history.flows or history.flows[-1].time != now:
        return history

    def busy(flow: Flow) -> float:
        # Work beyond what the maximum number of replicas could do is capped, so that one absurd value has no effect for
        # hours.
        most = context.policy.autoscaling.most_replicas
        return min(demand.busy_replicas((flow,), rates, context.policy.max_sequences), most)

    latest, recent = history.flows[-1], context.recent_flows
    return replace(
        history,
        variance=history.variance.seen(busy(latest), seconds=latest.seconds),
        ramp=history.ramp.seen(
            sum(busy(flow) * flow.seconds for flow in recent) / sum(flow.seconds for flow in recent),
            seconds=latest.seconds,
            start_up=start_ups.usual,
            window=context.rules.scale_down.window_seconds,
            now=now,
        ),
    )


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
