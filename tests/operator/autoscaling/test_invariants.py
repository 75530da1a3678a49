"""Invariants after any observation and any history."""

import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_operator.api import ScaleDown, ScaleUp
from quire_operator.autoscaling.decide import decide
from quire_operator.autoscaling.history import Change, History, ScalingRecord
from quire_operator.autoscaling.observation import (
    Histogram,
    Observation,
    ReplicaObservation,
    ReplicaPhase,
    ReplicaSample,
    is_sane,
)
from quire_operator.autoscaling.rates import Rates
from quire_operator.deployment.status import autoscaling_status, capacity_status, scaling_record

START = 1_000_000.0
amounts = st.floats(0, 1e6) | st.integers(0, 40).map(float)
wild = amounts | st.sampled_from([math.nan, -1.0, math.inf])
histograms = st.lists(st.floats(0, 1000), min_size=4, max_size=4).map(
    lambda counts: Histogram(bounds=(0.1, 0.5, 1.0, math.inf), counts=tuple(sorted(counts)))
)


def samples(values: st.SearchStrategy[float], ages: st.SearchStrategy[float]) -> st.SearchStrategy[ReplicaSample]:
    optional = st.none() | values
    return st.builds(
        ReplicaSample,
        time=ages.map(lambda age: START - age),
        waiting=values,
        running=values,
        queued_prompt_tokens=values,
        kv_tokens_used=values,
        kv_tokens_capacity=st.floats(1, 1e6),
        arrived_requests=optional,
        arrived_prompt_tokens=optional,
        prompt_tokens=values,
        cached_prompt_tokens=values,
        generation_tokens=values,
        finished_requests=values,
        steps=optional,
        busy_seconds=optional,
        first_token_waits=st.none() | histograms,
    )


def replicas(sample: st.SearchStrategy[ReplicaSample | None]) -> st.SearchStrategy[tuple[ReplicaObservation, ...]]:
    one = st.builds(
        ReplicaObservation, name=st.sampled_from("abcdefgh"), phase=st.sampled_from(ReplicaPhase), sample=sample
    )
    return st.lists(one, max_size=8).map(tuple)


any_replicas = replicas(st.none() | samples(wild, st.floats(-100, 300)))
observations = st.builds(
    Observation,
    replicas=any_replicas,
    target=st.none() | st.integers(0, 12),
    held_requests=st.none() | st.integers(0, 100),
    in_flight_requests=st.none() | st.integers(0, 3),
    rolling_out=st.booleans(),
)
rates = st.builds(
    Rates,
    step_seconds=st.floats(0, 1),
    prefill_seconds_per_token=st.floats(0, 0.1),
    decode_seconds_per_token=st.floats(0, 0.1),
    mean_prompt_tokens=st.floats(0, 1e5),
    mean_output_tokens=st.floats(0, 1e4),
    kv_tokens=st.floats(1, 1e6),
)
records = st.builds(
    ScalingRecord,
    desired_replicas=st.none() | st.integers(0, 12),
    changes=st.lists(
        st.builds(
            Change,
            time=st.floats(START - 500, START),
            from_replicas=st.integers(0, 12),
            to_replicas=st.integers(0, 12),
            reason=st.just("Steady"),
            message=st.just(""),
        ),
        max_size=4,
    ).map(tuple),
    rates=st.none() | rates,
)
rules = st.fixed_dictionaries(
    {
        "min_replicas": st.integers(0, 3),
        "max_replicas": st.integers(3, 10),
        "max_sequences": st.integers(1, 300),
        "queue_depth": st.none() | st.integers(1, 10),
        "kv_usage_percent": st.none() | st.integers(1, 100),
        "up": st.builds(
            ScaleUp.steps,
            window_seconds=st.sampled_from([0.0, 30.0]),
            max_percent=st.sampled_from([0, 50, 100]),
            max_step=st.integers(1, 4),
            period_seconds=st.sampled_from([15.0, 60.0]),
        ),
        "down": st.builds(
            ScaleDown.steps,
            window_seconds=st.sampled_from([0.0, 60.0]),
            max_step=st.integers(0, 4),
            period_seconds=st.sampled_from([15.0, 60.0]),
        ),
    }
)


def shifted(observation: Observation, seconds: float, *, target: int | None) -> Observation:
    """Return the same observation at a later time."""
    moved = tuple(
        replace(r, sample=None if r.sample is None else replace(r.sample, time=r.sample.time + seconds))
        for r in observation.replicas
    )
    return replace(observation, replicas=moved, target=target)


def lived(policy, observations: list[Observation], record: ScalingRecord) -> tuple[History, int | None]:
    """Return a history of ticks 15 s apart, ending 15 s before START, and the replicas requested then."""
    history, target = History.restored(record), None
    for number, observation in enumerate(observations):
        ago = 15.0 * (len(observations) - number)
        decision = decide(policy, shifted(observation, -ago, target=target), history, START - ago)
        history, target = decision.history, decision.desired
    return history, target


def sane(sample: ReplicaSample) -> bool:
    """Return True if the sample is fresh and has only valid values."""
    return is_sane(sample) and -30 <= START - sample.time <= 45


@given(rules, st.lists(observations, max_size=6), observations, records)
def test_decisions_respect_bounds_and_keep_on_missing_data(kit, rules, past, observation, record):
    policy = kit.policy(**rules)
    history, _ = lived(policy, past, record)

    decision = decide(policy, observation, history, START)

    assert policy.autoscaling.min_replicas <= decision.desired <= policy.autoscaling.max_replicas
    assert decide(policy, observation, history, START) == decision
    assert len(decision.victims) <= max(0, decision.current - decision.desired)
    assert decision.message and "nan" not in decision.message
    assert all(math.isfinite(value) for value in decision.inputs.values())
    fell = decision.desired < decision.current <= policy.autoscaling.max_replicas
    if fell:
        names = {r.name for r in observation.replicas if r.phase is ReplicaPhase.READY}
        assert decision.inputs["fresh"] == decision.inputs["ready"], names
        assert not observation.rolling_out
        assert history.last_tick is not None
        steps = [step.value for step in policy.autoscaling.scale_down.policies]
        assert decision.current - decision.desired <= max(steps, default=0)
    if fell and decision.desired == 0:
        assert observation.held_requests == observation.in_flight_requests == 0
        ready = [r.sample for r in observation.replicas if r.phase is ReplicaPhase.READY]
        assert all(sample.running == sample.waiting == 0 for sample in ready if sample is not None and sane(sample))


GAUGES = ("waiting", "running", "queued_prompt_tokens", "kv_tokens_used")
ARRIVALS = ("arrived_requests", "arrived_prompt_tokens")
good = replicas(samples(amounts, st.floats(0, 40)))


@given(rules, st.lists(observations, max_size=6), good, records, st.data())
def test_more_demand_never_means_fewer_replicas(kit, rules, past, replicas, record, data):
    policy = kit.policy(**rules)
    history, target = lived(policy, past, record)
    less = Observation(replicas=replicas, target=target, held_requests=data.draw(st.integers(0, 50)))
    raised = []
    for replica in replicas:
        sample = replica.sample
        for name in (*GAUGES, *ARRIVALS):
            value = getattr(sample, name)
            if value is not None:
                sample = replace(sample, **{name: value + data.draw(st.sampled_from([0.0, 1.0, 100.0]))})
        raised.append(replace(replica, sample=sample))
    more = replace(less, replicas=tuple(raised), held_requests=less.held_requests + data.draw(st.integers(0, 50)))

    assert decide(policy, more, history, START).desired >= decide(policy, less, history, START).desired


@given(rules, st.lists(observations, max_size=6), observations, records, st.randoms(use_true_random=False))
def test_order_of_replicas_does_not_matter(kit, rules, past, observation, record, random):
    policy = kit.policy(**rules)
    history, _ = lived(policy, past, record)
    by_name = {replica.name: replica for replica in observation.replicas}
    ordered = replace(observation, replicas=tuple(by_name.values()))
    shuffled = replace(observation, replicas=tuple(random.sample(ordered.replicas, len(by_name))))

    assert decide(policy, shuffled, history, START) == decide(policy, ordered, history, START)


@given(rules, st.lists(observations, min_size=1, max_size=6), observations, records)
def test_restart_from_the_status_never_scales_down_first(kit, rules, past, observation, record):
    policy = kit.policy(**rules)
    history, target = lived(policy, past, record)
    written = {
        "autoscaling": autoscaling_status(history.record),
        "capacity": capacity_status(history.record, block_size=16),
    }
    restored = scaling_record(written)
    assert restored is not None and restored.desired_replicas == history.record.desired_replicas

    decision = decide(policy, replace(observation, target=target), History.restored(restored), START)

    bounds = policy.autoscaling.min_replicas, policy.autoscaling.max_replicas
    assert bounds[0] <= decision.desired <= bounds[1]
    assert decision.desired >= min(target, bounds[1])


class Plant:
    """Replicas that share constant traffic: each runs up to its limit, the rest waits; new ones load for a while."""

    def __init__(self, *, load: float, slots: int, tokens_per_request: float, kv_tokens: float, startup: float) -> None:
        self.load, self.slots, self.tokens, self.kv_tokens = load, slots, tokens_per_request, kv_tokens
        self.startup = startup
        self.born: list[float] = [-math.inf]

    def resize(self, count: int, now: float) -> None:
        self.born = self.born[:count] + [now] * (count - len(self.born))

    def observe(self, now: float) -> Observation:
        up = [n for n, born in enumerate(self.born) if now - born >= self.startup]
        share = self.load / max(1, len(up))
        running = min(self.slots, self.kv_tokens / self.tokens, share)
        seen = []
        for number in range(len(self.born)):
            sample = None
            if number in up:
                sample = ReplicaSample(
                    time=now,
                    waiting=share - running,
                    running=running,
                    queued_prompt_tokens=(share - running) * self.tokens,
                    kv_tokens_used=running * self.tokens,
                    kv_tokens_capacity=self.kv_tokens,
                )
            phase = ReplicaPhase.LOADING if sample is None else ReplicaPhase.READY
            seen.append(ReplicaObservation(name=f"r{number}", phase=phase, sample=sample))
        return Observation(replicas=tuple(seen), target=len(self.born))


@settings(max_examples=settings.default.max_examples // 2)
@given(
    load=st.floats(0, 200),
    slots=st.integers(1, 64),
    tokens=st.floats(10, 2000),
    kv_tokens=st.floats(2000, 100_000),
    startup=st.sampled_from([0.0, 30.0, 120.0, 420.0]),
    first=st.integers(1, 10),
    queue_depth=st.none() | st.integers(1, 8),
)
def test_replicas_for_constant_load_converge(kit, load, slots, tokens, kv_tokens, startup, first, queue_depth):
    down = ScaleDown.steps(window_seconds=120, max_step=2, period_seconds=30)
    policy = kit.policy(max_replicas=10, max_sequences=slots, queue_depth=queue_depth, down=down)
    plant = Plant(load=load, slots=slots, tokens_per_request=tokens, kv_tokens=kv_tokens, startup=startup)
    now, history = START, History()
    plant.resize(first, now - startup)
    desired = []
    for _ in range(160):
        decision = decide(policy, plant.observe(now), history, now)
        history = decision.history
        plant.resize(decision.desired, now)
        desired.append(decision.desired)
        now += 15
    late = desired[100:]
    assert sum(a != b for a, b in zip(late, late[1:], strict=False)) <= 1, desired
    # On the way there, it scales up and down at most once each.
    turns = [b - a for a, b in zip(desired, desired[1:], strict=False) if a != b]
    assert sum((a > 0) != (b > 0) for a, b in zip(turns, turns[1:], strict=False)) <= 1, desired
