"""The rows of the comparison: a trace as requests with an engine fitted to it, a start-up delay, and a fault.

The engine is fitted to the trace by one rule for every file: an 8-billion-parameter model on a 24-GB accelerator
(``BASE``), made slower or faster as a whole until the trace keeps ``MEAN_BUSY`` replicas busy on average, with a KV
cache of ``KV_SEQUENCES`` sequences of the trace's mean length. No trace is repeated. Faults are placed by the trace:

none            no fault
scrape-outage   no metrics for 5 minutes, from the start of the steepest ramp of the scored part
crashed-pod     the busiest replica dies in the busiest minute of the scored part
slow-pods       the two oldest replicas take twice as long for the middle half of the scored part
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from quire_cli.simulation.engine import EngineModel
from quire_cli.simulation.fleet import Crash, Fault, Scenario, ScrapeOutage, SlowReplicas
from quire_cli.simulation.traces import MOONCAKE_BLOCK_TOKENS, Replay, Request, read_trace, shaped

MEAN_BUSY = 2.0
KV_SEQUENCES = 24
_KV_HEADROOM = 1.25
"""The factor by which the cache is larger than the longest request."""
_SLOWEST, _FASTEST = 4.0, 1 / 64
"""The limits of the engine's speed relative to ``BASE``; a trace beyond them keeps fewer or more replicas busy."""

BASE = EngineModel(
    prefill_tokens_per_second=2500.0,
    step_seconds=0.030,
    decode_seconds_per_sequence=0.0005,
    decode_seconds_per_kv_token=2e-7,
    kv_tokens=48_000,
)

WARM_UP = 1 / 3
"""The share of the trace's time that is not scored."""

DAY = "day"
_DAY_SECONDS = 3600.0
_DAY_REQUESTS = 5000
_DAY_SWING = 0.75
_DAY_NOISE = 0.25
_MINUTE = 60.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """A trace with its engine. Compared by identity, because its requests are many."""

    name: str
    requests: tuple[Request, ...]
    engine: EngineModel
    mean_busy: float
    """The mean number of busy replicas."""

    @property
    def span_seconds(self) -> float:
        return self.requests[-1].time

    @property
    def scored_from(self) -> float:
        return self.span_seconds * WARM_UP


def load_of(path: Path) -> Load:
    """Return the load of a trace file. Raise TraceError or OSError."""
    return fitted(path.stem, tuple(shaped(read_trace(path), Replay())))


def fitted(name: str, requests: tuple[Request, ...]) -> Load:
    """Return the load with the engine of the rule above."""
    mean = sum(r.prompt_tokens + r.output_tokens for r in requests) / len(requests)
    longest = max(r.prompt_tokens + r.output_tokens for r in requests)
    kv_tokens = math.ceil(max(KV_SEQUENCES * mean, _KV_HEADROOM * longest))
    engine = replace(BASE, kv_tokens=kv_tokens)
    work = busy_seconds(requests, engine)
    span = max(requests[-1].time, 1.0)
    scale = max(_FASTEST, min(MEAN_BUSY * span / work, _SLOWEST))
    return Load(name=name, requests=requests, engine=slower(engine, scale), mean_busy=work * scale / span)


def slower(engine: EngineModel, times: float) -> EngineModel:
    """Return an engine in which every part of a step takes ``times`` as long."""
    return replace(
        engine,
        prefill_tokens_per_second=engine.prefill_tokens_per_second / times,
        step_seconds=engine.step_seconds * times,
        decode_seconds_per_sequence=engine.decode_seconds_per_sequence * times,
        decode_seconds_per_kv_token=engine.decode_seconds_per_kv_token * times,
    )


def busy_seconds(requests: Sequence[Request], engine: EngineModel) -> float:
    """Return the busy seconds of one engine that runs full batches and finds every prompt block in its cache."""
    return sum(costs(requests, engine))


def costs(requests: Sequence[Request], engine: EngineModel) -> list[float]:
    """Return those seconds by request."""
    seen: set[int] = set()
    tokens = sum(r.prompt_tokens + r.output_tokens / 2 for r in requests) / len(requests)
    batch = max(1.0, min(engine.max_sequences, engine.kv_tokens / tokens))
    per_token = (
        engine.step_seconds / batch + engine.decode_seconds_per_sequence + engine.decode_seconds_per_kv_token * tokens
    )
    result: list[float] = []
    for request in requests:
        uncached = request.prompt_tokens - _cached_tokens(request, seen)
        seen.update(request.prefix_blocks)
        result.append(uncached / engine.prefill_tokens_per_second + request.output_tokens * per_token)
    return result


def _cached_tokens(request: Request, seen: set[int]) -> int:
    """Return the cached tokens of a prompt, at most all but the last."""
    blocks = next((n for n, block in enumerate(request.prefix_blocks) if block not in seen), len(request.prefix_blocks))
    return min(blocks * MOONCAKE_BLOCK_TOKENS, request.prompt_tokens - 1)


def day_shaped(lengths: Sequence[Request], *, seed: int = 1) -> Load:
    """Return a day in an hour: night, morning, noon, evening, with noise in each minute.

    Its lengths are sampled from ``lengths``.

    The arrivals are a Poisson process whose rate is 1 − swing · cos(2πt / day), times a log-normal factor each minute.
    """
    rng = random.Random(seed)
    minutes = [
        (1 - _DAY_SWING * math.cos(2 * math.pi * (minute + 0.5) * _MINUTE / _DAY_SECONDS))
        * rng.lognormvariate(0, _DAY_NOISE)
        for minute in range(round(_DAY_SECONDS / _MINUTE))
    ]
    per_unit = _DAY_REQUESTS / sum(minutes) / _MINUTE
    requests: list[Request] = []
    for minute, weight in enumerate(minutes):
        time = minute * _MINUTE
        while (time := time + rng.expovariate(weight * per_unit)) < (minute + 1) * _MINUTE:
            drawn = rng.choice(lengths)
            requests.append(Request(time, drawn.prompt_tokens, drawn.output_tokens))
    return fitted(DAY, tuple(requests))


def jittered(load: Load, seed: int, *, tick_seconds: float = 15.0) -> tuple[Request, ...]:
    """Return the trace shifted by less than one tick, and each arrival by up to a second; seed 0 changes nothing."""
    if seed == 0:
        return load.requests
    rng = random.Random(seed)
    shift = rng.uniform(0, tick_seconds)
    moved = [
        Request(max(0.0, r.time + shift + rng.uniform(-1, 1)), r.prompt_tokens, r.output_tokens, r.prefix_blocks)
        for r in load.requests
    ]
    return tuple(sorted(moved, key=lambda r: r.time))


# --- cases ---

STARTUP_DELAYS = (30.0, 120.0, 420.0)
TARGETS = (0.95, 0.99)
SEEDS = (0, 1, 2)
MIN_REPLICAS = 1
MAX_REPLICAS = 48
INITIAL_REPLICAS = 4

OUTAGE_SECONDS = 300.0
SLOW_COUNT, SLOW_FACTOR = 2, 2.0
_BIN_SECONDS = 10.0
_RAMP_SECONDS = 120.0


class FaultKind(StrEnum):
    NONE = "none"
    SCRAPE_OUTAGE = "scrape-outage"
    CRASHED_POD = "crashed-pod"
    SLOW_PODS = "slow-pods"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row without its target."""

    load: Load
    startup_delay_seconds: float
    fault: FaultKind

    def requests(self, seed: int) -> tuple[Request, ...]:
        return jittered(self.load, seed)

    def scenario(self, seed: int) -> Scenario:
        return Scenario(
            engine=self.load.engine,
            startup_delay_seconds=self.startup_delay_seconds,
            min_replicas=MIN_REPLICAS,
            max_replicas=MAX_REPLICAS,
            initial_replicas=INITIAL_REPLICAS,
            faults=faults_of(self.load, self.fault),
            seed=seed,
            scored_from=self.load.scored_from,
        )

    def static(self, replicas: int, seed: int) -> Scenario:
        """Return the scenario with a fixed number of replicas from the start."""
        return replace(self.scenario(seed), min_replicas=replicas, max_replicas=replicas, initial_replicas=replicas)


def cases(
    load: Load, *, delays: Sequence[float] = STARTUP_DELAYS, faults: Sequence[FaultKind] = tuple(FaultKind)
) -> list[Case]:
    return [Case(load=load, startup_delay_seconds=delay, fault=fault) for delay in delays for fault in faults]


def faults_of(load: Load, kind: FaultKind) -> tuple[Fault, ...]:
    start, end = load.scored_from, load.span_seconds
    match kind:
        case FaultKind.NONE:
            return ()
        case FaultKind.SCRAPE_OUTAGE:
            return (ScrapeOutage(start=steepest_ramp(load), seconds=OUTAGE_SECONDS),)
        case FaultKind.CRASHED_POD:
            return (Crash(time=busiest(load)),)
        case FaultKind.SLOW_PODS:
            quarter = (end - start) / 4
            return (SlowReplicas(start=start + quarter, seconds=2 * quarter, factor=SLOW_FACTOR, count=SLOW_COUNT),)


def steepest_ramp(load: Load) -> float:
    """Return the time at which the next two minutes require most more than the last two, if the outage fits."""
    bins = _binned(load)
    width = round(_RAMP_SECONDS / _BIN_SECONDS)
    first = int(load.scored_from // _BIN_SECONDS)
    last = int((load.span_seconds - OUTAGE_SECONDS) // _BIN_SECONDS)
    candidates = range(first, max(first, last) + 1)
    rise = {at: sum(bins[at : at + width]) - sum(bins[max(0, at - width) : at]) for at in candidates}
    return max(load.scored_from, max(candidates, key=lambda at: rise[at]) * _BIN_SECONDS)


def busiest(load: Load) -> float:
    """Return the middle of the scored minute with the most prompt tokens."""
    bins = _binned(load)
    width = round(60.0 / _BIN_SECONDS)
    first = int(load.scored_from // _BIN_SECONDS)
    sums = {at: sum(bins[at : at + width]) for at in range(first, len(bins))}
    return (max(sums, key=lambda at: sums[at]) + width / 2) * _BIN_SECONDS


def _binned(load: Load) -> list[float]:
    """Return the prompt tokens that arrive in each 10 s."""
    bins = [0.0] * (int(load.span_seconds // _BIN_SECONDS) + 1)
    for request in load.requests:
        bins[int(request.time // _BIN_SECONDS)] += request.prompt_tokens
    return bins
