"""The facts of one tick: which samples can be trusted, what happened since the last tick, and what that teaches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.api.deployment import Spec
from quire_operator.api.scaling import Autoscaling, AutoscalingMode
from quire_operator.autoscaling import demand
from quire_operator.autoscaling.demand import Load, Tuning
from quire_operator.autoscaling.flow import Increment, Thresholds, flow, increment, learnt
from quire_operator.autoscaling.history import Flow, History
from quire_operator.autoscaling.latency_terms import worst_late
from quire_operator.autoscaling.observation import Observation, ReplicaSample, without_duplicates
from quire_operator.autoscaling.rates import Rates
from quire_operator.autoscaling.supply import Supply, known_samples, take_stock


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


def decision_context(
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
