#!/usr/bin/env python3
"""What automatic prefix caching costs where it finds nothing: hashing and look-up, as a share of a step.

Every prompt is random, so nothing is ever found. CPU time is read inside: around what ``PrefixCache`` does (hash and
look up as a request is admitted, hash and publish as blocks fill), and around each step, both of the step's own thread,
so that waiting for other processes counts in neither. Reading the clock is part of what is counted.

Two mixes: decode-heavy (short prompts, long answers) and prefill-heavy (long prompts, short answers). With a real model
the share is of the whole step. Without one the step is schedule and commit alone: what is left of Python's work.
"""

import argparse
import functools
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time
from typing import Any

import report
from engines import (
    Bench,
    SimulatedClock,
    StepTime,
    add_model_options,
    ask,
    engine_without_model,
    load,
    random_tokens,
)
from report import at_least_one

from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.core.prefix_cache import PrefixCache
from quire_engine.core.scheduler import SchedulerConfig
from quire_engine.engine import Engine

GOAL = 0.01
MAX_NUM_SEQS = 64
MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 2048
BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
MEASURED = ("find", "publish", "find_each")


@dataclass(frozen=True, kw_only=True)
class Mix:
    name: str
    prompts: tuple[int, int]
    answers: tuple[int, int]


MIXES = (
    Mix(name="decode-heavy", prompts=(16, 64), answers=(64, 128)),
    Mix(name="prefill-heavy", prompts=(512, 1536), answers=(1, 4)),
)


@dataclass
class Inside:
    """CPU seconds of the thread."""

    seconds: float = 0.0
    calls: int = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*arguments: Any, **named: Any) -> Any:
            began = thread_time()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds += thread_time() - began
                self.calls += 1

        return wrapper


@contextmanager
def inside_the_prefix_cache() -> Iterator[Inside]:
    """None of the methods calls another of them."""
    inside = Inside()
    originals = {name: getattr(PrefixCache, name) for name in MEASURED}
    try:
        for name, original in originals.items():
            setattr(PrefixCache, name, inside.timed(original))
        yield inside
    finally:
        for name, original in originals.items():
            setattr(PrefixCache, name, original)


@dataclass
class Total:
    steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    inside_seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Row:
    runner: str
    mix: str
    total: Total
    share: float
    """The median over the runs."""


@dataclass
class Runs:
    total: Total = field(default_factory=Total)
    shares: list[float] = field(default_factory=list)

    def add(self, run: Total) -> None:
        total = self.total
        total.steps += run.steps
        total.tokens += run.tokens
        total.step_seconds += run.step_seconds
        total.inside_seconds += run.inside_seconds
        total.calls += run.calls
        self.shares.append(run.inside_seconds / run.step_seconds)


def without_model(requests: int) -> Engine:
    return engine_without_model(
        SchedulerConfig(
            max_num_seqs=min(MAX_NUM_SEQS, requests),
            max_num_batched_tokens=MAX_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
        ),
        num_blocks=requests * (MAX_MODEL_LEN // BLOCK_SIZE),
        block_size=BLOCK_SIZE,
        time=StepTime(step_seconds=0.0, token_seconds=0.0),
        clock=SimulatedClock(),
    )


def measure(engine: Engine, mix: Mix, requests: int, vocab_size: int, chance: random.Random) -> Total:
    for key in range(requests):
        ask(engine, key, random_tokens(chance, chance.randint(*mix.prompts), vocab_size), chance.randint(*mix.answers))
    total = Total()
    with inside_the_prefix_cache() as inside:
        while engine.has_work:
            began = thread_time()
            engine.step()
            total.step_seconds += thread_time() - began
    total.steps, total.tokens = engine.counters.steps, engine.counters.scheduled_tokens
    total.inside_seconds, total.calls = inside.seconds, inside.calls
    assert engine.counters.prefix_cache_hits == 0, "a random prompt was found in the cache"
    return total


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=at_least_one, default=32, help="of each mix (default 32)")
    parser.add_argument("--runs", type=at_least_one, default=3, help="of each mix, by turns (default 3)")
    parser.add_argument("--no-model", action="store_true", help="leave the real model out, and torch with it")
    parser.add_argument("--kv-cache-mib", type=at_least_one, default=1024, help="of the real model (default 1,024)")
    add_model_options(parser)
    return parser.parse_args()


def load_bench(arguments: argparse.Namespace) -> Bench:
    return load(
        arguments,
        cache=CacheOptions(block_size=BLOCK_SIZE, kv_cache_memory_bytes=arguments.kv_cache_mib * 2**20),
        scheduler=SchedulerOptions(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_BATCHED_TOKENS),
        max_model_len=MAX_MODEL_LEN,
    )


def main() -> None:
    arguments = parse_arguments()
    bench = None if arguments.no_model else load_bench(arguments)
    makers: dict[str, Callable[[], Engine]] = {"no model": lambda: without_model(arguments.requests)}
    if bench is not None:
        makers[bench.config.model.path.name] = bench.engine
    vocab_size = VOCAB_SIZE if bench is None else bench.model.vocab_size
    chance = random.Random(1)
    runs = {(runner, mix): Runs() for runner in makers for mix in MIXES}
    with report.progress() as progress:
        task = progress.add_task("runs", total=arguments.runs * len(runs))
        for _ in range(arguments.runs):
            for (runner, mix), measured in runs.items():
                measured.add(measure(makers[runner](), mix, arguments.requests, vocab_size, chance))
                progress.advance(task)
    rows = [
        Row(runner=runner, mix=mix.name, total=measured.total, share=statistics.median(measured.shares))
        for (runner, mix), measured in runs.items()
    ]
    present(arguments, rows)


def present(arguments: argparse.Namespace, rows: Sequence[Row]) -> None:
    report.show(
        "Prefix caching that finds nothing: CPU time of the step's thread",
        ["runner, mix", "tokens a step", "step", "hash and look-up", "a token", "share of the step"],
        [
            [
                f"{row.runner}, {row.mix}",
                f"{row.total.tokens / row.total.steps:,.0f}",
                f"{row.total.step_seconds / row.total.steps * 1e3:,.3f} ms",
                f"{row.total.inside_seconds / row.total.steps * 1e6:,.1f} µs",
                f"{row.total.inside_seconds / row.total.tokens * 1e6:.3f} µs",
                f"{row.share:.2%}",
            ]
            for row in rows
        ],
        notes=[
            f"{arguments.requests} requests a mix, medians of {arguments.runs} runs by turns; no model: a step is"
            " schedule and commit alone",
            f"the goal is ≤ {GOAL:.0%} of a step with a model",
        ],
    )
    report.save(
        arguments.json,
        [
            {
                "runner": row.runner,
                "mix": row.mix,
                "steps": row.total.steps,
                "tokens": row.total.tokens,
                "step_seconds": row.total.step_seconds,
                "inside_seconds": row.total.inside_seconds,
                "calls": row.total.calls,
                "share": row.share,
            }
            for row in rows
        ],
    )
    if arguments.plot:
        draw(arguments.plot, rows)


def draw(path: Path, rows: Sequence[Row]) -> None:
    figure = report.new_figure("Hash and look-up where no prefix is found", width=9, height=3.5)
    axes = figure.subplots()
    names = [f"{row.runner}\n{row.mix}" for row in rows][::-1]
    bars = axes.barh(names, [row.share * 100 for row in rows][::-1])
    axes.bar_label(bars, fmt="%.2g %%", padding=3)
    axes.axvline(GOAL * 100, color="black", linestyle="--", linewidth=1, label="goal with a model")
    axes.set(xscale="log", xlabel="% of the step's CPU time (no model: of schedule and commit)")
    axes.set_xlim(min(0.01, *(row.share * 50 for row in rows)), 200)
    axes.legend(loc="lower right")
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
