#!/usr/bin/env python3
"""What long prompts cost those who generate, with and without --max-generation-stall: no HTTP, no IPC.

Some streams decode all the time; a long prompt arrives, and the next one when that has its first token. Inter-token
latency is that of the streams, time to first token that of the long prompts. Throughput counts both, prompts too.
"""

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter

from rich.console import Console
from rich.table import Table
from steps import DEMO_MODEL, Bench, usable_threads

from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.ipc.process import compute_environment


@dataclass(frozen=True, kw_only=True)
class Result:
    max_generation_stall_seconds: float
    """0 is no bound."""
    itl_p50_seconds: float
    itl_p99_seconds: float
    itl_max_seconds: float
    ttft_median_seconds: float
    tokens_per_second: float
    tokens: int


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    parser.add_argument("--streams", type=int, default=8, help="sequences that decode (default 8)")
    parser.add_argument("--prompt", type=int, default=4000, help="tokens of a long prompt, if the model takes as many")
    parser.add_argument("--prompts", type=int, default=3, help="long prompts, one after another (default 3)")
    parser.add_argument("--stall", type=float, nargs="+", default=[0.0, 0.25], help="bounds in seconds; 0 is none")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser.parse_args()


class Streams:
    """Sequences that decode until the run ends, and long prompts that come between."""

    def __init__(self, engine: Engine, *, vocab_size: int, streams: int) -> None:
        self.engine = engine
        self.chance = Random(1)
        self.vocab_size = vocab_size
        self.gaps: list[float] = []
        """Between tokens of one stream."""
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
        """Seconds until its first token."""
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
    load.take_prompt(prompt)  # its pages of the cache are touched for the first time
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
    table = Table(title="Long prompts beside streams", title_justify="left", show_edge=False)
    for column in ("bound", "ITL p50", "ITL p99", "ITL max", "TTFT of a prompt", "tokens/s"):
        table.add_column(column, justify="right")
    rows = []
    for stall in arguments.stall:
        result = measure(bench, stall, streams=arguments.streams, prompt=prompt, prompts=arguments.prompts)
        rows.append(asdict(result))
        table.add_row(
            f"{stall:g} s" if stall else "none",
            *(
                f"{seconds * 1e3:,.1f} ms"
                for seconds in (
                    result.itl_p50_seconds,
                    result.itl_p99_seconds,
                    result.itl_max_seconds,
                    result.ttft_median_seconds,
                )
            ),
            f"{result.tokens_per_second:,.0f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{arguments.model.name}, {bench.model.dtype}, {arguments.streams} streams, {arguments.prompts} prompts of"
        f" {prompt} tokens, {arguments.threads} threads on {usable_threads()} CPUs",
        style="dim",
        highlight=False,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
