"""The simulator's engine and gateway against the real ones, which it may not import: same scheduling, same choices."""

from dataclasses import asdict
from math import inf, pi

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_cli.simulation import balance, gateway
from quire_cli.simulation.counters import FIRST_TOKEN_WAIT_BOUNDS
from quire_cli.simulation.engine import Engine
from quire_cli.simulation.scenario import EngineModel, Request
from quire_cli.simulation.sequence import Sequence
from quire_engine.config import AdmissionOptions, SchedulerOptions
from quire_engine.core.batch import RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.core.sequence import Request as EngineRequest
from quire_engine.server import serve
from quire_engine.server.observability.metrics import TIME_TO_FIRST_TOKEN
from quire_gateway import balance as real_balance
from quire_gateway import learning
from quire_gateway import prefixes as real_prefixes
from quire_gateway import scrape as real_scrape

RATE, STEP, BLOCK = 1000.0, 0.1, 16


def as_scheduled(model: EngineModel, told: list[Request]) -> dict[int, tuple[float, float]]:
    """First token and end of each, by the real scheduler, whose steps take STEP and 1 / RATE a token."""
    config = SchedulerConfig(
        max_num_seqs=model.max_sequences,
        max_num_batched_tokens=model.max_batched_tokens,
        max_model_len=10**6,
        enable_prefix_caching=model.prefix_caching,
        preemption_mode="recompute",
    )
    groups = (KVCacheGroup(layers=(0,), num_blocks=model.kv_tokens // BLOCK),)
    scheduler = Scheduler(config, KVCacheLayout(block_size=BLOCK, groups=groups))
    first, last = {}, {}
    now, coming = 0.0, list(enumerate(told))
    while coming or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, coming[0][1].time)
        while coming and coming[0][1].time <= now:
            key, request = coming.pop(0)
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            scheduler.add(EngineRequest(key=key, prompt_token_ids=token_ids(key, request), params=params, seed=0))
        batch = scheduler.schedule()
        if batch is None:
            continue
        now += STEP + batch.num_tokens / RATE
        output = scheduler.commit(batch, RunnerOutput(token_ids=[7] * sum(batch.samples)))
        for key in output.keys:
            first.setdefault(key, now)
        last |= {finished.key: now for finished in output.finished}
    return {key: (first[key], last[key]) for key in last}


def token_ids(key: int, request: Request) -> list[int]:
    """Prefix blocks with equal names hold equal tokens; what follows is the request's own."""
    ids = [1000 + block for block in request.prefix_blocks for _ in range(BLOCK)]
    return (ids + [100_000 + key] * request.prompt_tokens)[: request.prompt_tokens]


def as_simulated(model: EngineModel, told: list[Request]) -> dict[int, tuple[float, float]]:
    engine = Engine(model, name="r", prefix_block_tokens=BLOCK)
    sequences = [Sequence(request, order=key, prefix_block_tokens=BLOCK) for key, request in enumerate(told)]
    for sequence in sequences:
        engine.advance(sequence.arrival)
        engine.add(sequence, sequence.arrival)
    engine.advance(1e9)
    return {s.order: (s.first_token, s.finish) for s in sequences if s.finish is not None}


# Times that no step ends at: whether a request is in the step that begins as it comes must not hang on rounding.
TIMES = st.integers(0, 300).map(lambda n: n * pi / 31)


@st.composite
def models(draw, *, prefix_caching=False):
    sequences = draw(st.integers(1, 6))
    return EngineModel(
        prefill_tokens_per_second=RATE,
        step_seconds=STEP,
        decode_seconds_per_sequence=1 / RATE,
        kv_tokens=draw(st.integers(8, 200)) * BLOCK if not prefix_caching else 10**6,
        max_sequences=sequences,
        max_batched_tokens=draw(st.integers(sequences, 300)),
        prefix_caching=prefix_caching,
        max_generation_stall_seconds=None,
    )


@st.composite
def requests(draw, *, depth=0):
    group = draw(st.integers(0, 2))
    blocks = tuple(10 * group + place for place in range(draw(st.integers(0, depth))))
    return Request(draw(TIMES), draw(st.integers(1, 200)), draw(st.integers(1, 60)), blocks)


def in_order(told: list[Request]) -> list[Request]:
    return sorted(told, key=lambda request: request.time)


@settings(max_examples=150, deadline=None)
@given(models(), st.lists(requests(), max_size=20).map(in_order))
def test_the_simulated_engine_schedules_as_the_real_one(model, told):
    simulated, real = as_simulated(model, told), as_scheduled(model, told)
    assert simulated == {key: (pytest.approx(first), pytest.approx(last)) for key, (first, last) in real.items()}


@settings(max_examples=100, deadline=None)
@given(models(prefix_caching=True), st.lists(requests(depth=8), max_size=20).map(in_order))
def test_the_simulated_engine_finds_the_prefixes_that_the_real_one_finds(model, told):
    simulated, real = as_simulated(model, told), as_scheduled(model, told)
    assert simulated == {key: (pytest.approx(first), pytest.approx(last)) for key, (first, last) in real.items()}


def test_queues_are_as_long_as_the_engines():
    model = EngineModel(
        prefill_tokens_per_second=1.0, step_seconds=1.0, decode_seconds_per_sequence=1.0, kv_tokens=1600
    )
    assert model.max_queued_requests == AdmissionOptions().max_queued_requests
    assert model.max_queued_kv_caches == serve._KV_FULLS_QUEUED
    assert model.max_generation_stall_seconds == SchedulerOptions().max_generation_stall_seconds


def test_first_token_waits_have_the_engines_buckets():
    assert (*TIME_TO_FIRST_TOKEN, inf) == FIRST_TOKEN_WAIT_BOUNDS


LOADS = st.builds(
    balance.Load,
    running=st.integers(0, 20),
    waiting=st.integers(0, 20),
    max_running=st.integers(1, 20),
    kv_usage=st.floats(0, 1),
    finished_per_second=st.none() | st.floats(0, 10),
    in_flight=st.integers(0, 30),
    pending_tokens=st.floats(0, 1e5),
    prefill_tokens_per_second=st.none() | st.floats(1, 1e5),
)
CANDIDATES = st.builds(
    balance.Candidate,
    st.just(""),
    LOADS,
    st.integers(0, 40),
    st.floats(0, 1e5),
    st.sampled_from([0.0, 0.2, 0.3, 0.9, 1.0]),
)


@settings(max_examples=500, deadline=None)
@given(st.lists(CANDIDATES, min_size=1, max_size=5), st.floats(0, 1e5), st.floats(0, 1, exclude_max=True))
def test_the_simulated_gateway_picks_as_the_real_one(candidates, prompt_tokens, draw):
    named = [candidate._replace(name=f"r{place}") for place, candidate in enumerate(candidates)]
    real = [
        real_balance.Candidate(
            id=c.name,
            ready=True,
            suspect=False,
            in_flight=c.in_flight,
            load=real_balance.Load(**asdict(c.load)),
            sent_tokens=c.sent_tokens,
            prefix_share=c.prefix_share,
        )
        for c in named
    ]
    picked = real_balance.pick(real, prompt_tokens=prompt_tokens, draw=draw)
    assert real_balance.Picked(balance.pick(named, prompt_tokens, draw).name) == picked


def test_the_simulated_gateway_asks_and_remembers_as_the_real_one():
    assert gateway.SCRAPE_SECONDS == real_scrape.PERIOD_SECONDS
    simulated, real = gateway.PrefixIndex(), real_prefixes.PrefixIndex()
    capacities = dict.fromkeys("abcde", 30.0)
    for blocks, name in [((1, 2, 3), "a"), ((1, 2), "b"), ((4,), "c"), ((1, 9), "d"), ((1,), "e"), ((1,), "f")]:
        simulated.sent(blocks, name, 20.0)
        real.served(blocks, name, 20.0)
    for name, tokens in [("d", 30.0), ("b", 30.5)]:
        simulated.sent((5,), name, tokens)
        real.served((5,), name, tokens)
    for blocks in [(1, 2, 3, 5), (1, 9), (1,), (4, 1), (), (7,)]:
        assert simulated.shares(blocks, capacities) == real.shares(blocks, capacities)


def test_the_simulated_gateway_learns_as_the_real_one():
    rates = (gateway.FinishRate(), learning.Rate())
    for time, finished in [(0.0, 0), (1.0, 0), (2.0, 3), (9.0, 3), (11.5, 8), (13.0, 8), (30.0, 9)]:
        assert rates[0].add(finished, time) == rates[1].add(finished, time)
    speeds = (gateway.PrefillRate(), learning.PrefillRate())
    for computed, seconds in [(0, 0.0), (900, 1.0), (900, 2.0), (1000, 2.5), (6000, 6.5), (9000, 7.0), (9300, 9.0)]:
        assert speeds[0].add(computed, seconds) == speeds[1].add(computed, seconds)


TOKENS_TOLD = [(0.05, 300), (0.31, 700), (0.32, 20), (0.9, 1), (2.5, 5000), (2.6, 40)]


def test_the_simulated_engine_tells_its_pending_prompt_tokens_as_the_real_one():
    """At any time, by what the real one's process has reported at the end of its last step, and was sent since."""
    model = EngineModel(
        prefill_tokens_per_second=RATE,
        step_seconds=STEP,
        decode_seconds_per_sequence=1 / RATE,
        kv_tokens=10**6,
        max_sequences=8,
        max_batched_tokens=250,
        max_generation_stall_seconds=None,
    )
    told = [Request(time, tokens, 3) for time, tokens in TOKENS_TOLD]
    real = pending_as_scheduled(model, told)
    engine = Engine(model, name="r", prefix_block_tokens=BLOCK)
    coming = [Sequence(request, order=key, prefix_block_tokens=BLOCK) for key, request in enumerate(told)]
    seen = []
    for time, _ in real:
        while coming and coming[0].arrival <= time:
            engine.advance(coming[0].arrival)
            engine.add(coming[0], coming.pop(0).arrival)
        engine.advance(time)
        seen.append((time, engine.pending_prefill_tokens()))
    assert seen == [(time, pytest.approx(tokens)) for time, tokens in real]
    assert max(tokens for _, tokens in real) > 4000


def pending_as_scheduled(model: EngineModel, told: list[Request]) -> list[tuple[float, float]]:
    """Each 0.13 s: the real scheduler's gauges, put together as the API process does."""
    config = SchedulerConfig(
        max_num_seqs=model.max_sequences,
        max_num_batched_tokens=model.max_batched_tokens,
        max_model_len=10**6,
    )
    groups = (KVCacheGroup(layers=(0,), num_blocks=model.kv_tokens // BLOCK),)
    scheduler = Scheduler(config, KVCacheLayout(block_size=BLOCK, groups=groups))
    reports = [(0.0, 0, 0)]
    """When a step ended; what it left to compute; what the engine process had received when it began."""
    now, received, coming = 0.0, 0, list(enumerate(told))
    while coming or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, coming[0][1].time)
        while coming and coming[0][1].time <= now:
            key, request = coming.pop(0)
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            scheduler.add(EngineRequest(key=key, prompt_token_ids=token_ids(key, request), params=params, seed=0))
            received += request.prompt_tokens
        batch = scheduler.schedule()
        assert batch is not None
        now += STEP + batch.num_tokens / RATE
        scheduler.commit(batch, RunnerOutput(token_ids=[7] * sum(batch.samples)))
        gauges = scheduler.gauges()
        reports.append((now, gauges.prefilling_tokens + gauges.queued_tokens - gauges.parked_tokens, received))
    found = []
    for time in [0.13 * n for n in range(120)]:
        _, left, received = max(report for report in reports if report[0] <= time)
        sent = sum(request.prompt_tokens for request in told if request.time <= time)
        found.append((time, left + sent - received))
    return found
