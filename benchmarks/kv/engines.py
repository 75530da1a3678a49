"""Engines for the benchmarks to step: over a real model in this process, or over none under a simulated clock.

No HTTP, no IPC, no second process: what is timed is the engine's own step.
"""

import argparse
import os
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from report import at_least_one

from quire_engine.config import (
    CacheOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerOptions,
)
from quire_engine.core.batch import Batch, FinishedSequence, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.policy import PolicyName
from quire_engine.core.ports import LoadedModel
from quire_engine.core.preemption import PreemptionMode
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.core.sequence import Request
from quire_engine.core.stall_bound import StallBound, StepCosts
from quire_engine.engine import Engine, make_engine
from quire_engine.errors import EngineError
from quire_engine.ipc.process import compute_environment

SHAPES = Path(__file__).parent / "shapes"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "quire-demo"
LoadFormat = Literal["safetensors", "dummy"]
DRAWN = 7
LITTLE_A_PAIR = 1e-9
"""Of a token's time: a simulated step takes no longer for what a token looks back on."""


# --- a real model ---


def add_model_options(parser: argparse.ArgumentParser, *, default: str = "demo") -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default=default,
        help=f"a model folder; demo, the demo model; or {', '.join(_shapes())}: random weights in that shape"
        f" (default {default})",
    )
    group.add_argument("--load-format", choices=("safetensors", "dummy"), help="dummy: random weights for any folder")
    group.add_argument("--threads", type=at_least_one, default=usable_threads(), help="default: all CPUs")


def _shapes() -> list[str]:
    return sorted(folder.name for folder in SHAPES.iterdir())


def usable_threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A loaded model. Every engine made of it begins with an empty cache."""

    config: EngineConfig
    model: LoadedModel

    def engine(
        self,
        *,
        layout: KVCacheLayout | None = None,
        prefix_caching: bool = True,
        preemption_mode: PreemptionMode = "auto",
        policy: PolicyName = "fcfs",
    ) -> Engine:
        """``layout`` uses less of the cache than was allocated."""
        model = self.model if layout is None else replace(self.model, layout=layout)
        cache = replace(self.config.cache, enable_prefix_caching=prefix_caching)
        scheduler = replace(self.config.scheduler, preemption_mode=preemption_mode, policy=policy)
        return make_engine(model, scheduler=scheduler, cache=cache)

    def __str__(self) -> str:
        return f"{self.config.model.path.name}, {self.model.dtype}, {self.config.threads} threads"


def load(
    arguments: argparse.Namespace, *, cache: CacheOptions, scheduler: SchedulerOptions, max_model_len: int
) -> Bench:
    """Sets the threads' environment as the engine process has it, before torch is loaded."""
    path = Path(arguments.model)
    load_format: LoadFormat = arguments.load_format or "safetensors"
    if arguments.model == "demo":
        path = DEMO_MODEL
    elif arguments.model in _shapes():
        path, load_format = SHAPES / arguments.model, "dummy"
    config = EngineConfig(
        model=ModelOptions(path=path, load_format=load_format, max_model_len=max_model_len),
        cache=cache,
        scheduler=scheduler,
        parallel=ParallelOptions(),
        server=ServerOptions(),
        threads=arguments.threads,
    )
    os.environ.update(compute_environment(arguments.threads, {}))
    from quire_engine.runner import load_model

    try:
        return Bench(config=config, model=load_model(config))
    except EngineError as error:
        raise SystemExit(str(error)) from None


# --- requests ---


def random_tokens(chance: random.Random, count: int, vocab_size: int) -> list[int]:
    return [chance.randrange(vocab_size // 2) for _ in range(count)]


def ask(
    engine: Engine, key: int, prompt: list[int], max_tokens: int, *, tenant: str | None = None, priority: int = 0
) -> None:
    """Hand over a greedy request that answers with exactly so many tokens."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    refusal = engine.add(
        Request(key=key, prompt_token_ids=prompt, params=params, seed=key, tenant=tenant, priority=priority)
    )
    if refusal is not None:
        raise SystemExit(refusal.message)


def finish(engine: Engine) -> list[FinishedSequence]:
    """Step until nothing is left."""
    finished: list[FinishedSequence] = []
    while engine.has_work:
        step = engine.step()
        if step is not None:
            finished += step.output.finished
    return finished


# --- no model ---


@dataclass
class SimulatedClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What a simulated step takes."""

    step_seconds: float
    token_seconds: float

    def of(self, tokens: int) -> float:
        return self.step_seconds + self.token_seconds * tokens


@dataclass(frozen=True)
class Drawn:
    output: RunnerOutput

    def wait(self) -> RunnerOutput:
        return self.output


@dataclass(frozen=True)
class NoModel:
    """A runner that draws one token for all, and moves a simulated clock on by what a step would take."""

    clock: SimulatedClock
    time: StepTime

    def execute(self, batch: Batch) -> Drawn:
        seconds = self.time.of(batch.num_tokens)
        self.clock.now += seconds
        return Drawn(RunnerOutput(token_ids=[DRAWN] * sum(batch.samples), run_seconds=seconds))

    def close(self) -> None:
        pass


def engine_without_model(
    scheduler: SchedulerConfig, *, num_blocks: int, block_size: int, time: StepTime, clock: SimulatedClock
) -> Engine:
    """With a bound to generation stalls where steps take time, as in service."""
    layout = KVCacheLayout(block_size=block_size, groups=(KVCacheGroup(layers=(0,), num_blocks=num_blocks),))
    bound = None
    if time.step_seconds > 0.0 and time.token_seconds > 0.0:
        costs = StepCosts(
            fixed=time.step_seconds, per_token=time.token_seconds, per_pair=time.token_seconds * LITTLE_A_PAIR
        )
        bound = StallBound(SchedulerOptions().max_generation_stall_seconds, at_least=block_size, costs=costs)
    return Engine(scheduler=Scheduler(scheduler, layout, None, bound), runner=NoModel(clock, time), now=clock)
