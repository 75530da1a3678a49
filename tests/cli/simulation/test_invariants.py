"""Invariants for every trace, engine, policy and random failure."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_cli.simulation.engine import Engine, EngineModel, Sequence
from quire_cli.simulation.fleet import Crash, Scaling, Scenario, ScrapeOutage, SlowReplicas, simulate
from quire_cli.simulation.results import Outcome
from quire_cli.simulation.traces import Request
from quire_operator.autoscaling.observation import ReplicaSample, is_sane

TIMES = st.integers(0, 400).map(lambda n: n / 10)


@st.composite
def requests(draw):
    group, depth = draw(st.integers(0, 3)), draw(st.integers(0, 4))
    prompt = draw(st.integers(1, 300))
    return Request(draw(TIMES), prompt, draw(st.integers(1, 60)), tuple(100 * group + place for place in range(depth)))


@st.composite
def engines(draw, kv_costs=(0.0, 1e-4)):
    sequences = draw(st.integers(1, 6))
    return EngineModel(
        prefill_tokens_per_second=draw(st.sampled_from([200.0, 1000.0])),
        step_seconds=draw(st.sampled_from([0.01, 0.1])),
        decode_seconds_per_sequence=draw(st.sampled_from([0.0, 0.01])),
        decode_seconds_per_kv_token=draw(st.sampled_from(kv_costs)),
        kv_tokens=draw(st.integers(8, 60)) * 16,
        max_sequences=sequences,
        max_batched_tokens=draw(st.integers(sequences, 300)),
        prefix_caching=draw(st.booleans()),
        max_generation_stall_seconds=draw(st.sampled_from([None, 0.1])),
    )


FAULTS = st.one_of(
    TIMES.map(lambda time: Crash(time=time)),
    TIMES.map(lambda time: ScrapeOutage(start=time, seconds=10.0)),
    TIMES.map(lambda time: SlowReplicas(start=time, seconds=10.0, factor=3.0, count=2)),
)


@st.composite
def scenarios(draw):
    return Scenario(
        engine=draw(engines()),
        startup_delay_seconds=draw(st.sampled_from([0.0, 3.0, 20.0])),
        min_replicas=0,
        max_replicas=4,
        initial_replicas=draw(st.integers(0, 3)),
        drain_seconds=draw(st.sampled_from([0.0, 5.0])),
        hold_seconds=draw(st.sampled_from([5.0, 50.0])),
        faults=tuple(draw(st.lists(FAULTS, max_size=2))),
        seed=draw(st.integers(0, 3)),
        prefix_block_tokens=draw(st.sampled_from([16, 40, 50])),
        settle_seconds=draw(st.sampled_from([0.0, 300.0])),
    )


class Whims:
    """An autoscaler that requests any numbers of replicas from a list and keeps its observations."""

    def __init__(self, wishes):
        self.wishes = wishes
        self.period_seconds, self.scrape_seconds = 2.0, 1.5
        self.seen = []

    def decide(self, observation, now):
        self.seen.append(observation)
        return Scaling(replicas=self.wishes[len(self.seen) % len(self.wishes)])


WISHES = st.lists(st.integers(0, 5), min_size=1, max_size=6)
COUNTERS = (
    "arrived_requests",
    "arrived_prompt_tokens",
    "prompt_tokens",
    "cached_prompt_tokens",
    "generation_tokens",
    "finished_requests",
    "steps",
    "busy_seconds",
)


@settings(max_examples=150, deadline=None)
@given(st.lists(requests(), max_size=25), scenarios(), WISHES)
def test_every_request_ends_once_and_every_sample_is_valid(told, scenario, wishes):
    scaler = Whims(wishes)
    run = simulate(told, scenario, scaler)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in run.requests] == sorted(
        ((r.time, r.prompt_tokens, r.output_tokens) for r in told), key=lambda key: key[0]
    )
    for request in run.requests:
        assert (request.finish is not None) == (request.outcome is Outcome.FINISHED)
        if request.finish is not None:
            assert request.arrival < request.first_token <= request.finish
        if request.first_token is not None and not request.preemptions:
            assert request.first_token - request.arrival >= request.own_prefill_seconds - 1e-9
    assert all(step.replicas >= 0 for step in run.holding)
    assert run.replica_hours >= 0.0 and 0.0 <= run.attainment() <= 1.0
    assert all(0 <= decision.desired <= 4 for decision in run.decisions)
    histories: dict[str, list[ReplicaSample]] = {}
    for observation in scaler.seen:
        for replica in observation.replicas:
            if replica.sample is not None:
                histories.setdefault(replica.name, []).append(replica.sample)
    for history in histories.values():
        assert all(is_sane(sample) and sample.kv_tokens_used <= sample.kv_tokens_capacity for sample in history)
        if any(isinstance(fault, Crash) for fault in scenario.faults):
            continue  # an engine that died counts from zero
        for before, after in pairwise(history):
            assert all(getattr(before, name) <= getattr(after, name) + 1e-9 for name in COUNTERS)
            for old, new in zip(before.histograms, after.histograms, strict=True):
                assert all(a <= b for a, b in zip(old.counts, new.counts, strict=True))


@settings(max_examples=40, deadline=None)
@given(st.lists(requests(), max_size=15), scenarios(), WISHES)
def test_simulation_is_deterministic(told, scenario, wishes):
    assert simulate(told, scenario, Whims(wishes)) == simulate(told, scenario, Whims(wishes))


def one_engine(model, told, *, prefix_block_tokens=40, looks=()):
    """Return one engine after the requests, polled at the given times, which also split its work."""
    engine = Engine(model, name="r", prefix_block_tokens=prefix_block_tokens)
    sequences = [
        Sequence(request, order=order, prefix_block_tokens=prefix_block_tokens)
        for order, request in enumerate(sorted(told, key=lambda request: request.time))
    ]
    events = [(s.arrival, 0, s.order) for s in sequences] + [(time, 1, 0) for time in looks]
    for time, is_look, order in sorted(events):
        engine.advance(time)
        if is_look:
            engine._cut(time)
            engine.sample(time)
        else:
            engine.add(sequences[order], time)
    engine.advance(1e9)
    return engine, [sequence.result for sequence in sequences]


@settings(max_examples=150, deadline=None)
@given(engines(kv_costs=(0.0,)), st.lists(requests(), max_size=20), st.lists(TIMES, max_size=30))
def test_observation_frequency_does_not_change_the_result(model, told, looks):
    _, plain = one_engine(model, told)
    _, watched = one_engine(model, told, looks=looks)
    assert [(s.first_token, s.finish, s.preemptions) for s in watched] == [
        (s.first_token and pytest.approx(s.first_token), s.finish and pytest.approx(s.finish), s.preemptions)
        for s in plain
    ]


@settings(max_examples=150, deadline=None)
@given(engines(), st.lists(requests(), max_size=20))
def test_engine_runs_while_it_has_work_and_frees_all_blocks(model, told):
    engine, sequences = one_engine(model, told)
    spans = sorted((s.arrival, s.finish) for s in sequences if s.outcome is not Outcome.FAILED)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    sample = engine.sample(1e9)
    assert sample.busy_seconds == pytest.approx(busy)
    assert sample.finished_requests == len(sequences) and engine.kv.used == 0
    served = [s for s in sequences if s.outcome is Outcome.FINISHED]
    assert sample.generation_tokens == sum(s.output_tokens for s in served)
    assert sample.first_token_waits.total == sample.first_token_times.total == len(served)
    # A token that follows a recomputation comes with it and not from a decode step.
    recomputed = sum(s.preemptions for s in sequences)
    assert sample.generation_tokens - len(served) - recomputed <= sample.token_gaps.total
    assert sample.token_gaps.total <= sample.generation_tokens - len(served)
