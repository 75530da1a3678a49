"""An engine in this process, driven step by step with a case's checkpoint and a schedule."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from quire_parity.cases import ANSWER
from quire_parity.schedules import Schedule, Seen

from quire_engine.config import CacheOptions, EngineConfig, ModelOptions, ParallelOptions, ServerOptions
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.runner import load_model

ALONE = ParallelOptions()
DType = Literal["float32", "bfloat16", "float16"]


@dataclass(slots=True)
class Heard:
    """The answer to one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


def config_of(
    folder: Path,
    *,
    max_model_len: int,
    scheduler: SchedulerOptions,
    cache: CacheOptions,
    dtype: DType = "float32",
    parallel: ParallelOptions = ALONE,
) -> EngineConfig:
    return EngineConfig(
        model=ModelOptions(path=folder, dtype=dtype, max_model_len=max_model_len),
        cache=cache,
        scheduler=scheduler,
        server=ServerOptions(),
        threads=1,
        parallel=parallel,
    )


def start(config: EngineConfig) -> Engine:
    return make_engine(load_model(config), scheduler=config.scheduler)


def block_bytes(config: EngineConfig) -> int:
    """Return the bytes of a block in all layers together."""
    model = load_model(config)
    blocks = sum(group.num_blocks * len(group.layers) for group in model.layout.groups)
    return model.kv_cache_bytes // blocks * sum(len(group.layers) for group in model.layout.groups)


def cache_options(schedule: Schedule, block_bytes: int) -> CacheOptions:
    return CacheOptions(
        block_size=schedule.block_size,
        kv_cache_memory_bytes=schedule.cache_blocks * block_bytes,
        swap_space_bytes=schedule.swap_blocks * block_bytes,
    )


def follow(engine: Engine, prompts: list[list[int]], schedule: Schedule) -> tuple[list[list[Heard]], Seen]:
    """Return the answers to each prompt in each round."""
    seen = Seen()
    rounds = []
    for _ in range(schedule.rounds):
        batches = [list(enumerate(prompts))] if schedule.together else [[pair] for pair in enumerate(prompts)]
        heard: dict[int, Heard] = {}
        for batch in batches:
            heard |= ask(engine, batch, seen)
        rounds.append([heard[key] for key in range(len(prompts))])
    seen.prefix_cache_hits = engine.counters.prefix_cache_hits
    for label, count in engine.counters.preemptions.items():
        seen.preemptions[label.partition(":")[0]] += count
    return rounds, seen


def ask(
    engine: Engine, prompts: Iterable[tuple[int, list[int]]], seen: Seen, *, max_tokens: int = ANSWER
) -> dict[int, Heard]:
    """Request all prompts at once and return the answers; blocks are counted after every step."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=0)
    heard: dict[int, Heard] = {}
    for key, prompt in prompts:
        refusal = engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=0))
        assert refusal is None, refusal
        heard[key] = Heard()
    while engine.has_work:
        step = engine.step()
        engine.check_integrity()
        if step is None:
            continue  # the first of overlapping steps
        running = engine.gauges().num_running
        seen.most_running = max(seen.most_running, running)
        seen.partial_steps += running > len(step.keys)
        for i, key in enumerate(step.keys):
            assert step.logprobs is not None
            drawn = step.logprobs[i]
            assert drawn is not None
            heard[key].token_ids.append(step.token_ids[i])
            heard[key].logprobs.append(drawn.logprobs[0])
    return heard
