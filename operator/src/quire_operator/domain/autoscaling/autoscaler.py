"""How many replicas: ``decide(policy, observation, history, now) -> Decision``, a function of values.

Called by ``autoscale`` once a tick, in the cluster, locally and in the simulator alike. It knows neither Kubernetes nor
where the figures come from. In order: which samples can be trusted (``supply``), what flowed since the last tick
(``flow``) and what that teaches (``rates``), what demand asks for (``demand``), what windows and steps allow
(``limits``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.autoscaling import demand
from quire_operator.domain.autoscaling.decision_rules import DecisionInputs, Demand, ReplicaChoice, judge
from quire_operator.domain.autoscaling.demand import Load, Term
from quire_operator.domain.autoscaling.flow import Increment, flow, increment, learnt
from quire_operator.domain.autoscaling.history import Change, Flow, History, Move, Need, ScalingRecord
from quire_operator.domain.autoscaling.limits import kept_moves, kept_needs
from quire_operator.domain.autoscaling.observation import Observation, ReplicaSample, without_duplicates
from quire_operator.domain.autoscaling.rates import Rates
from quire_operator.domain.autoscaling.scaling_reasons import Reason
from quire_operator.domain.autoscaling.supply import Supply, known_samples, take_stock
from quire_operator.domain.autoscaling.ttft_correction import TtftCorrection
from quire_operator.domain.autoscaling.tuning import Tuning
from quire_operator.domain.resource.deployment import Spec
from quire_operator.domain.resource.scaling import Autoscaling, AutoscalingMode

_TOO_FEW = 0.99
"""What late first tokens count as on the way down, as a share of the replicas there are."""
_NOT_ENOUGH = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a person asked for: ``spec.autoscaling`` and what else of the spec bears on it."""

    autoscaling: Autoscaling
    max_sequences: int
    """Sequences one replica runs at once."""
    tuning: Tuning = Tuning()

    @classmethod
    def of(cls, spec: Spec) -> "Policy | None":
        """None where the spec has a fixed number of replicas."""
        if spec.autoscaling is None:
            return None
        return cls(autoscaling=spec.autoscaling, max_sequences=spec.engine.max_sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """How many replicas there should be, why, and what to remember."""

    time: float
    current: int
    desired: int
    reason: Reason
    message: str
    """One sentence with its numbers."""
    inputs: Mapping[str, float]
    terms: tuple[Term, ...]
    """What each kind of demand asked for; empty where nothing could be told."""
    victims: tuple[str, ...]
    """On the way down: the replicas that lose least, as many as go."""
    enforced: bool
    """False in Recommend mode: decided and explained, not to be acted upon."""
    bounds: tuple[int, int]
    """Fewest and most replicas."""
    oldest_sample: float | None
    """When the oldest among the newest samples of the ready replicas was taken; None where there is none."""
    history: History

    @property
    def is_change(self) -> bool:
        return self.desired != self.current

    @property
    def record(self) -> ScalingRecord:
        """What to persist before acting."""
        return self.history.record


def decide(policy: Policy, observation: Observation, history: History, now: float) -> Decision:
    """One tick of one LLMDeployment."""
    rules = policy.autoscaling
    history = history.forgetting_gaps(now).by_the_clock(now)
    is_first = history.last_tick is None
    seconds = 0.0 if history.last_tick is None else now - history.last_tick
    known = known_samples(observation, history.samples)
    supply = take_stock(observation, known, now)
    history = _remember_flow(history, known, supply, policy, now)
    rates = _rates(history, known)
    history = _watched(history, observation, rates, policy, is_first=is_first, now=now)
    enforced = rules.mode is AutoscalingMode.ENFORCE
    load = Load.of(supply.fresh.values())
    demanded = _demand(policy, supply, load, observation, history, rates, now)
    history = replace(
        history,
        needs=kept_needs((*history.needs, demanded.need), rules=rules, now=now),
        ttft_correction=_ttft_correction(history, demanded, supply, load, policy, seconds=seconds, now=now),
    )
    choice = judge(
        DecisionInputs(
            rules=rules,
            supply=supply,
            demand=demanded,
            needs=history.needs,
            moves=history.moves,
            rolling_out=observation.rolling_out,
            is_first=is_first,
            held=observation.held_requests,
            in_flight=observation.in_flight_requests,
            recommended=None if enforced else history.record.desired_replicas,
            now=now,
        )
    )
    inputs = _inputs(supply, load, demanded, observation, history)
    return Decision(
        time=now,
        current=supply.current,
        desired=choice.desired,
        reason=choice.reason,
        message=choice.message,
        inputs=inputs,
        terms=demanded.terms,
        victims=supply.victims(supply.current - choice.desired) if choice.desired < supply.current else (),
        enforced=enforced,
        bounds=(rules.min_replicas, rules.max_replicas),
        oldest_sample=supply.oldest_sample,
        history=_concluded(history, choice, supply.current, inputs, rates, enforced=enforced, rules=rules, now=now),
    )


# --- what is remembered ---


def _remember_flow(
    history: History, known: Mapping[str, ReplicaSample], supply: Supply, policy: Policy, now: float
) -> History:
    """With this tick's samples, and what they show since the last."""
    threshold = policy.autoscaling.targets.time_to_first_token.threshold_seconds
    remembered = max(policy.tuning.flow_seconds, policy.tuning.first_token_seconds)
    increments: list[Increment] = [
        increment(before, after, threshold_seconds=threshold)
        for name, after in known.items()
        if (before := history.samples.get(name)) is not None and before.time < after.time
    ]
    flows, ttft_correction = history.flows, history.ttft_correction
    if increments and history.last_tick is not None and now > history.last_tick:
        # Since something was last heard of any replica, not since the last tick: what came in meanwhile is no burst.
        since = flows[-1].time if flows else history.last_tick
        latest = flow(increments, seconds=now - since, now=now)
        flows = (*flows, latest)
        ttft_correction = ttft_correction.seen(
            first_tokens=latest.first_tokens, late=latest.late_first_tokens, seconds=latest.seconds, now=now
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
    """What was learnt in this life, else what was persisted in an earlier one."""
    if not known:
        return history.rates
    kv_tokens = sum(sample.kv_tokens_capacity for sample in known.values()) / len(known)
    return history.evidence.rates(kv_tokens=kv_tokens, before=history.rates) or history.rates


def _watched(
    history: History, observation: Observation, rates: Rates | None, policy: Policy, *, is_first: bool, now: float
) -> History:
    """With how long replicas took to start, and, where anything was heard, with the work of this look."""
    start_ups = history.start_ups.seen(without_duplicates(observation.replicas), is_first=is_first, now=now)
    history = replace(history, start_ups=start_ups)
    if rates is None or not history.flows or history.flows[-1].time != now:
        return history
    rules = policy.autoscaling

    def busy(flow: Flow) -> float:
        # Work that no number of replicas could do counts as what they all could: one absurd figure must not be
        # remembered for hours.
        return min(demand.busy_replicas((flow,), rates, policy.max_sequences), rules.max_replicas)

    latest, of_late = history.flows[-1], _of_late(history, policy, now)
    return replace(
        history,
        variance=history.variance.seen(busy(latest), seconds=latest.seconds),
        ramp=history.ramp.seen(
            sum(busy(flow) * flow.seconds for flow in of_late) / sum(flow.seconds for flow in of_late),
            seconds=latest.seconds,
            start_up=start_ups.usual,
            window=rules.scale_down.window_seconds,
            now=now,
        ),
    )


def _of_late(history: History, policy: Policy, now: float) -> Sequence[Flow]:
    """The flows that arrivals are averaged over."""
    return [flow for flow in history.flows if flow.time > now - policy.tuning.flow_seconds]


def _ttft_correction(
    history: History, demanded: Demand, supply: Supply, load: Load, policy: Policy, *, seconds: float, now: float
) -> TtftCorrection:
    """Raised, where first tokens are late though the work should fit."""
    needs = {term.reason: term.need for term in demanded.terms}
    ttft_correction = history.ttft_correction.needed(needs.get(Reason.WORK, 0.0), seconds=seconds)
    if Reason.FIRST_TOKEN not in needs:
        return ttft_correction
    percentile = policy.autoscaling.targets.time_to_first_token.percentile
    return ttft_correction.raised(replicas=supply.current, waiting=load.waiting, percentile=percentile, now=now)


def _concluded(
    history: History,
    choice: ReplicaChoice,
    current: int,
    inputs: Mapping[str, float],
    rates: Rates | None,
    *,
    enforced: bool,
    rules: Autoscaling,
    now: float,
) -> History:
    """With the decision among what was decided, and, if it is carried out, among what was moved."""
    record, moves = history.record.with_rates(rates, now).with_start_up(history.start_ups.learnt), history.moves
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
        if enforced:
            moves = (*moves, Move(time=now, from_replicas=current, to_replicas=choice.desired))
    return replace(history, record=record, rates=rates, moves=kept_moves(moves, rules=rules, now=now))


# --- what is needed ---


def _demand(
    policy: Policy,
    supply: Supply,
    load: Load,
    observation: Observation,
    history: History,
    rates: Rates | None,
    now: float,
) -> Demand:
    target, tuning = policy.autoscaling.targets.time_to_first_token, policy.tuning
    if supply.is_stale:
        return Demand(terms=(), need=Need(time=now, up=0.0, down=float(supply.current)))
    terms = _terms(policy, supply, load, observation, history, rates, now)
    need = max((term.need for term in terms), default=0.0)
    down = need + supply.starting + supply.missing
    late = demand.first_token_term(history.flows, target=target, replicas=supply.current, tuning=tuning, now=now)
    if late is not None:
        down = max(down, _TOO_FEW * supply.current)
        settled = history.settled_since is not None and now - history.settled_since >= tuning.first_token_seconds
        if settled:
            terms.append(late)
            need = max(need, late.need)
            # So that the one more it brings is not taken away again at once: so many were not enough.
            down = max(down, supply.current + _NOT_ENOUGH)
    return Demand(terms=tuple(terms), need=Need(time=now, up=need, down=down))


def _terms(
    policy: Policy,
    supply: Supply,
    load: Load,
    observation: Observation,
    history: History,
    rates: Rates | None,
    now: float,
) -> list[Term]:
    """Every term that there are figures for, but the late first tokens."""
    terms: list[Term] = []
    if supply.fresh:
        terms += demand.gauge_terms(
            load,
            rates=rates,
            kv_tokens=sum(s.kv_tokens_capacity for s in supply.fresh.values()) / load.replicas,
            max_sequences=policy.max_sequences,
            targets=policy.autoscaling.targets,
        )
    work = demand.work_term(
        _of_late(history, policy, now),
        history.variance,
        history.ramp,
        start_up=history.start_ups.usual,
        queued_prompt_tokens=load.queued_prompt_tokens,
        rates=rates,
        max_sequences=policy.max_sequences,
        percentile=policy.autoscaling.targets.time_to_first_token.percentile,
        tuning=policy.tuning,
    )
    if work is not None:
        terms.append(demand.with_ttft_correction(work, history.ttft_correction, now=now))
    if observation.held_requests is not None:
        terms.append(demand.held_term(observation.held_requests, max_sequences=policy.max_sequences))
    if supply.current > 0:
        # At zero what is in flight is with a replica that drains, and asks for no other.
        arrived = history.flows[-1].requests if history.flows else 0.0
        active = demand.activity_term(arrived, observation.in_flight_requests or 0)
        terms += [] if active is None else [active]
    return terms


def _inputs(
    supply: Supply, load: Load, demanded: Demand, observation: Observation, history: History
) -> dict[str, float]:
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
        "startUpSeconds": history.start_ups.usual,
    }
    if observation.held_requests is not None:
        inputs["heldRequests"] = observation.held_requests
    if observation.in_flight_requests is not None:
        inputs["inFlightRequests"] = observation.in_flight_requests
    inputs |= {f"need{term.reason.value}": term.need for term in demanded.terms}
    return {name: round(value, 3) for name, value in inputs.items()}
