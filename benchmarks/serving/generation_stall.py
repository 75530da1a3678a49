#!/usr/bin/env python3
"""Measure what long prompts cost running streams, with and without --max-generation-stall, without HTTP or IPC.

Some streams decode all the time. A long prompt arrives, and the next one when the first has its first token.
Inter-token latency is that of the streams, time to first token that of the long prompts. Throughput counts both,
prompts too.
"""

import argparse
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter

from benchmarks.report import DEMO_MODEL, machine, parser, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.ipc.process import compute_environment


@dataclass(frozen=True, kw_only=True)
class Result:
    max_generation_stall_seconds: float
    """The bound; 0 means none."""
    itl_p50_seconds: float
    itl_p99_seconds: float
    itl_max_seconds: float
    ttft_median_seconds: float
    tokens_per_second: float
    tokens: int


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, plot=False)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    options.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    options.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    options.add_argument("--streams", type=int, default=8, help="sequences that decode (default 8)")
    options.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt, limited by the model")
    options.add_argument("--prompts", type=int, default=3, help="long prompts, one after another (default 3)")
    options.add_argument("--stall", type=float, nargs="+", default=[0.0, 0.25], help="bounds in seconds; 0 means none")
    options.add_argument("--threads", type=int, default=len(usable_cpus()))
    return options.parse_args()


class Streams:
    """Sequences that decode until the run ends, and long prompts that arrive meanwhile."""

    def __init__(self, engine: Engine, *, vocab_size: int, streams: int) -> None:
        self.engine = engine
        self.chance = Random(1)
        self.vocab_size = vocab_size
        self.gaps: list[float] = []
        """Seconds between tokens of one stream."""
        self._last: dict[int, float] = {}
        self._keys = 0
        self.tokens = 0
        for _ in range(streams):
            self._add(32, 1_000_000)
        while len(self._last) < streams:
            self._step()

    def _add(self, length: int, max_tokens: int) -> int:
        self._keys += 1
        prompt = [self.chance.randrange(self.vocab_size // 2) for _ in range(length)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        refusal = self.engine.add(Request(key=self._keys, prompt_token_ids=prompt, params=params, seed=0))
        if refusal is not None:
            raise SystemExit(refusal.message)
        return self._keys

    def _step(self) -> list[int]:
        before = self.engine.counters.scheduled_tokens
        step = self.engine.step()
        assert step is not None
        now = perf_counter()
        for key in step.output.keys:
            if key in self._last:
                self.gaps.append(now - self._last[key])
            self._last[key] = now
        self.tokens += self.engine.counters.scheduled_tokens - before
        return step.output.keys

    def take_prompt(self, length: int) -> float:
        """Add a prompt and return the seconds until its first token."""
        began = perf_counter()
        key = self._add(length, 1)
        while key not in self._step():
            pass
        return perf_counter() - began

    def decode(self, steps: int) -> None:
        for _ in range(steps):
            self._step()


def measure(bench: Bench, stall: float, *, streams: int, prompt: int, prompts: int) -> Result:
    scheduler = replace(bench.config.scheduler, max_generation_stall_seconds=stall)
    engine = make_engine(bench.model, scheduler=scheduler, cache=bench.config.cache)
    load = Streams(engine, vocab_size=bench.model.vocab_size, streams=streams)
    load.take_prompt(prompt)  # touches the pages of the cache for the first time
    load.decode(20)
    load.gaps.clear()
    load.tokens, began, waits = 0, perf_counter(), []
    for _ in range(prompts):
        waits.append(load.take_prompt(prompt))
        load.decode(20)
    seconds = perf_counter() - began
    gaps = sorted(load.gaps)
    return Result(
        max_generation_stall_seconds=stall,
        itl_p50_seconds=statistics.median(gaps),
        itl_p99_seconds=gaps[len(gaps) * 99 // 100],
        itl_max_seconds=gaps[-1],
        ttft_median_seconds=statistics.median(waits),
        tokens_per_second=load.tokens / seconds,
        tokens=load.tokens,
    )


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    bench = Bench(
        arguments.model, threads=arguments.threads, dtype=arguments.dtype, dummy=arguments.load_format == "dummy"
    )
    prompt = min(arguments.prompt, bench.model.max_model_len - 1)
    lines, rows = [], []
    for stall in arguments.stall:
        result = measure(bench, stall, streams=arguments.streams, prompt=prompt, prompts=arguments.prompts)
        latencies = (result.itl_p50_seconds, result.itl_p99_seconds, result.itl_max_seconds, result.ttft_median_seconds)
        milliseconds = [f"{seconds * 1e3:,.1f} ms" for seconds in latencies]
        lines.append([f"{stall:g} s" if stall else "none", *milliseconds, f"{result.tokens_per_second:,.0f}"])
        rows.append(asdict(result))
    note = (
        f"{arguments.model.name}, {bench.model.dtype}, {arguments.streams} streams, {arguments.prompts} prompts of"
        f" {prompt} tokens, {arguments.threads} threads"
    )
    columns = ["bound", "ITL p50", "ITL p99", "ITL max", "TTFT of a prompt", "tokens/s"]
    show_table("Streams while long prompts arrive", columns, lines, (note, machine()))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
