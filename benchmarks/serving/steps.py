"""An engine in this process that is kept busy with decoding, and the time of its steps."""

import random
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

from quire_engine.config import (
    CacheOptions,
    DType,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    ServerOptions,
    SpeculationOptions,
)
from quire_engine.core.options import SchedulerOptions
from quire_engine.core.ports import LoadedModel
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine

MAX_BATCHED_TOKENS = 2048


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The wall and CPU time of one step."""

    wall_seconds: float
    cpu_seconds: float


class Bench:
    """A loaded model. Each measurement has a new scheduler. Load it after the environment is set."""

    def __init__(
        self,
        folder: Path,
        *,
        threads: int,
        dtype: DType = "auto",
        dummy: bool = False,
        kv_cache_bytes: int | None = None,
        speculation: SpeculationOptions | None = None,
        parallel: ParallelOptions | None = None,
    ) -> None:
        from quire_engine.runner import load_model

        self.config = EngineConfig(
            model=ModelOptions(path=folder, dtype=dtype, load_format="dummy" if dummy else "safetensors"),
            cache=CacheOptions(kv_cache_memory_bytes=kv_cache_bytes),
            # Prompts are computed in one step: a decode step must not contain a part of another prompt.
            scheduler=SchedulerOptions(
                max_num_batched_tokens=MAX_BATCHED_TOKENS, max_generation_stall_seconds=0.0, enable_prefix_caching=False
            ),
            server=ServerOptions(),
            threads=threads,
            speculation=speculation,
            parallel=parallel or ParallelOptions(),
        )
        self.model: LoadedModel = load_model(self.config)

    def decoding(self, batch: int, context: int, steps: int) -> Engine:
        """Return an engine with ``batch`` sequences of about ``context`` tokens and ``steps`` decode steps left."""
        engine = make_engine(self.model, scheduler=self.config.scheduler)
        self._submit(engine, batch, context, steps + 1)
        while (now := engine.gauges()).num_running < batch or now.queued_tokens or now.prefilling_tokens:
            engine.step()
        return engine

    def prefill(self, prompts: int, length: int) -> StepTime:
        """Measure the time until each of ``prompts`` prompts of ``length`` tokens has its first token."""
        engine = make_engine(self.model, scheduler=self.config.scheduler)
        self._submit(engine, prompts, length, 1)
        began, began_cpu = perf_counter(), process_time()
        while engine.has_work:
            engine.step()
        return StepTime(wall_seconds=perf_counter() - began, cpu_seconds=process_time() - began_cpu)

    def _submit(self, engine: Engine, count: int, length: int, max_tokens: int) -> None:
        chance = random.Random(1)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        for key in range(count):
            prompt = [chance.randrange(self.model.vocab_size // 2) for _ in range(length)]
            refusal = engine.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=key))
            if refusal is not None:
                raise SystemExit(refusal)


def time_steps(engine: Engine, steps: int) -> list[StepTime]:
    """Run ``steps`` steps and return the time of each."""
    times = []
    for _ in range(steps):
        began, began_cpu = perf_counter(), process_time()
        engine.step()
        times.append(StepTime(wall_seconds=perf_counter() - began, cpu_seconds=process_time() - began_cpu))
    return times
