"""The simulator's engine compared with the real scheduler, which it may not import.

Its gateway runs the real policy.
"""

from math import inf, pi

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_cli.simulation.engine import FIRST_TOKEN_WAIT_BOUNDS, TOKEN_GAP_BOUNDS, Engine, EngineModel, Sequence
from quire_cli.simulation.traces import Request
from quire_engine.api import serve
from quire_engine.api.metrics import PER_TOKEN, TIME_TO_FIRST_TOKEN
from quire_engine.config import AdmissionOptions
from quire_engine.core.batch import RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request as EngineRequest

RATE, STEP, BLOCK = 1000.0, 0.1, 16


def as_scheduled(model: EngineModel, told: list[Request]) -> dict[int, tuple[float, float]]:
    """Return first token and end of each request by the real scheduler with steps of STEP and 1 / RATE per token."""
    options = SchedulerOptions(
        max_num_seqs=model.max_sequences,
        max_num_batched_tokens=model.max_batched_tokens,
        enable_prefix_caching=model.prefix_caching,
        preemption_mode="recompute",
    )
    groups = (KVCacheGroup(layers=(0,), num_blocks=model.kv_tokens // BLOCK),)
    scheduler = Scheduler(options, ModelTraits(max_model_len=10**6), KVCacheLayout(block_size=BLOCK, groups=groups))
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
    """Return the tokens of a request: equal prefix blocks have equal tokens, the rest is its own."""
    ids = [1000 + block for block in request.prefix_blocks for _ in range(BLOCK)]
    return (ids + [100_000 + key] * request.prompt_tokens)[: request.prompt_tokens]


def as_simulated(model: EngineModel, told: list[Request]) -> dict[int, tuple[float, float]]:
    engine = Engine(model, name="r", prefix_block_tokens=BLOCK)
    sequences = [Sequence(request, order=key, prefix_block_tokens=BLOCK) for key, request in enumerate(told)]
    for sequence in sequences:
        engine.advance(sequence.arrival)
        engine.add(sequence, sequence.arrival)
    engine.advance(1e9)
    results = {s.order: s.result for s in sequences}
    return {order: (r.first_token, r.finish) for order, r in results.items() if r.finish is not None}


# No step ends at these times, because rounding must not decide whether a step contains a request.
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
def test_simulated_and_real_engine_find_the_same_prefixes(model, told):
    simulated, real = as_simulated(model, told), as_scheduled(model, told)
    assert simulated == {key: (pytest.approx(first), pytest.approx(last)) for key, (first, last) in real.items()}


def test_simulated_queues_equal_those_of_the_engine():
    model = EngineModel(
        prefill_tokens_per_second=1.0, step_seconds=1.0, decode_seconds_per_sequence=1.0, kv_tokens=1600
    )
    assert model.max_queued_requests == AdmissionOptions().max_queued_requests
    assert model.max_queued_kv_caches == serve._QUEUED_CACHE_SIZES
    assert model.max_generation_stall_seconds == SchedulerOptions().max_generation_stall_seconds


def test_first_token_waits_have_the_engines_buckets():
    assert (*TIME_TO_FIRST_TOKEN, inf) == FIRST_TOKEN_WAIT_BOUNDS
    assert (*PER_TOKEN, inf) == TOKEN_GAP_BOUNDS


TOKENS_TOLD = [(0.05, 300), (0.31, 700), (0.32, 20), (0.9, 1), (2.5, 5000), (2.6, 40)]


def test_simulated_and_real_engine_report_equal_pending_tokens():
    """The figure is that of the API process: the report of the last step's end and the requests sent since."""
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
    """Return the pending tokens every 0.13 s: the real scheduler's gauges, combined as in the API process."""
    options = SchedulerOptions(max_num_seqs=model.max_sequences, max_num_batched_tokens=model.max_batched_tokens)
    groups = (KVCacheGroup(layers=(0,), num_blocks=model.kv_tokens // BLOCK),)
    scheduler = Scheduler(options, ModelTraits(max_model_len=10**6), KVCacheLayout(block_size=BLOCK, groups=groups))
    reports = [(0.0, 0, 0)]
    """The end of each step, what it left to compute, and what the engine process had received at its start."""
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
