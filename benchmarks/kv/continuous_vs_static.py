#!/usr/bin/env python3
"""Continuous against static batching, with our own engine and a real model, on answers of mixed lengths.

Continuous: all requests are handed over at once; whoever ends makes room for the next in the very next step. Static: as
many requests as fit go together, and the next ones start when the last of them has ended. Two kinds: *padded*, where
every row is computed until the longest is done, as a plain ``generate`` over a batch does, and *trimmed*, where rows
that have ended cost nothing. The switch is here alone; the engine has none. Runs are interleaved (A B C A B C), figures
are medians, and only the tokens asked for count. Tokens per CPU second tell the same on a machine with other work.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter, process_time

import report
from engines import add_model_options, ask, load, random_tokens
from report import at_least_one

from quire_cli.bench.traces import read_trace
from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.engine import Engine

GOAL = 2
MAX_BATCHED_TOKENS = 1024
LONGEST_PROMPT = 64
TRACE = Path(__file__).parent / "azure_llm_2023_code_slice.csv"


@dataclass(frozen=True, kw_only=True)
class Ask:
    prompt: list[int]
    num_tokens: int


def answer_lengths(kind: str, count: int, longest: int, chance: random.Random) -> list[int]:
    """``trace``: as in the production trace here, cut at the longest. ``exponential``: a mean of a quarter of it."""
    if kind == "trace":
        drawn = [row.output_tokens for row in chance.sample(read_trace(TRACE), count)]
    else:
        drawn = [4 + int(chance.expovariate(4 / longest)) for _ in range(count)]
    return [min(longest, length) for length in drawn]


def make_asks(lengths: Sequence[int], vocab_size: int, chance: random.Random) -> list[Ask]:
    """Prompts of 8 to 64 tokens."""
    return [
        Ask(prompt=random_tokens(chance, chance.randint(8, LONGEST_PROMPT), vocab_size), num_tokens=length)
        for length in lengths
    ]


@dataclass
class Watch:
    """Of one run: when steps ended, and how many sequences each gave a token that was asked for."""

    began: float = field(default_factory=perf_counter)
    seconds: list[float] = field(default_factory=list)
    useful: list[int] = field(default_factory=list)

    def finish(self, engine: Engine, asks: Sequence[Ask], lengths: Sequence[int]) -> None:
        """Hand the requests over, and step until nothing is left."""
        for key, (wanted, length) in enumerate(zip(asks, lengths, strict=True)):
            ask(engine, key, wanted.prompt, length)
        missing = [wanted.num_tokens for wanted in asks]
        while engine.has_work:
            step = engine.step()
            if step is None:
                continue
            useful = 0
            for key in step.output.keys:
                useful += missing[key] > 0
                missing[key] -= 1
            self.seconds.append(perf_counter() - self.began)
            self.useful.append(useful)


def continuous(engine: Engine, asks: Sequence[Ask], size: int) -> Watch:
    watch = Watch()
    watch.finish(engine, asks, [wanted.num_tokens for wanted in asks])
    return watch


def static(engine: Engine, asks: Sequence[Ask], size: int, *, padded: bool) -> Watch:
    watch = Watch()
    for first in range(0, len(asks), size):
        batch = asks[first : first + size]
        longest = max(wanted.num_tokens for wanted in batch)
        watch.finish(engine, batch, [longest if padded else wanted.num_tokens for wanted in batch])
    return watch


Way = Callable[[Engine, Sequence[Ask], int], Watch]
WAYS: dict[str, Way] = {
    "continuous": continuous,
    "static, trimmed": lambda engine, asks, size: static(engine, asks, size, padded=False),
    "static, padded": lambda engine, asks, size: static(engine, asks, size, padded=True),
}


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    add_model_options(parser)
    parser.add_argument("--requests", type=at_least_one, default=160, help="at most 1,000 with --lengths trace")
    parser.add_argument("--lengths", choices=("trace", "exponential"), default="trace", help="of the answers")
    parser.add_argument("--batch-size", type=at_least_one, default=16)
    parser.add_argument("--longest", type=at_least_one, default=256, help="longest answer in tokens (default 256)")
    parser.add_argument("--runs", type=at_least_one, default=3, help="of each way (default 3)")
    parser.add_argument("--kv-cache-mib", type=at_least_one, default=256)
    arguments = parser.parse_args()
    if arguments.lengths == "trace" and arguments.requests > 1000:
        parser.error("--requests should be at most 1,000 with --lengths trace: the slice of it here has no more")
    if arguments.batch_size > MAX_BATCHED_TOKENS:
        parser.error(f"--batch-size should be at most {MAX_BATCHED_TOKENS}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    bench = load(
        arguments,
        # Prompts come again in each run: they must not be found.
        cache=CacheOptions(enable_prefix_caching=False, kv_cache_memory_bytes=arguments.kv_cache_mib * 2**20),
        scheduler=SchedulerOptions(max_num_seqs=arguments.batch_size, max_num_batched_tokens=MAX_BATCHED_TOKENS),
        max_model_len=LONGEST_PROMPT + arguments.longest,
    )
    chance = random.Random(1)
    lengths = answer_lengths(arguments.lengths, arguments.requests, arguments.longest, chance)
    asks = make_asks(lengths, bench.model.vocab_size, chance)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    last: dict[str, Watch] = {}
    with report.progress() as progress:
        task = progress.add_task("runs", total=arguments.runs * len(WAYS))
        engine = bench.engine(prefix_caching=False)
        continuous(engine, asks[: arguments.batch_size], arguments.batch_size)  # warm-up
        for _ in range(arguments.runs):
            for name, way in WAYS.items():
                began, began_cpu = perf_counter(), process_time()
                last[name] = way(engine, asks, arguments.batch_size)
                seconds[name].append(perf_counter() - began)
                cpu_seconds[name].append(process_time() - began_cpu)
                progress.advance(task)
    present(arguments, str(bench), asks, seconds, cpu_seconds, last)


def present(
    arguments: argparse.Namespace,
    model: str,
    asks: Sequence[Ask],
    seconds: dict[str, list[float]],
    cpu_seconds: dict[str, list[float]],
    last: dict[str, Watch],
) -> None:
    tokens = sum(ask.num_tokens for ask in asks)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    cpu_rates = {name: tokens / statistics.median(times) for name, times in cpu_seconds.items()}
    report.show(
        "Continuous against static batching",
        ["way", "steps", "tokens/s", "continuous is", "tokens per CPU second", "continuous is"],
        [
            [
                name,
                f"{len(last[name].seconds):,}",
                f"{rates[name]:,.0f}",
                f"{rates['continuous'] / rates[name]:.2f}×",
                f"{cpu_rates[name]:,.0f}",
                f"{cpu_rates['continuous'] / cpu_rates[name]:.2f}×",
            ]
            for name in WAYS
        ],
        notes=[
            f"{model}: {len(asks)} requests, {arguments.batch_size} at a time, answers of"
            f" {min(ask.num_tokens for ask in asks)} to {max(ask.num_tokens for ask in asks)} tokens, mean"
            f" {tokens / len(asks):.0f}; medians of {arguments.runs} interleaved runs",
            f"the goal is {GOAL}× against padded static batching",
        ],
    )
    report.save(
        arguments.json,
        [
            {
                "way": name,
                "steps": len(last[name].seconds),
                "tokens_per_second": rates[name],
                "tokens_per_cpu_second": cpu_rates[name],
                "useful_tokens": sum(last[name].useful),
            }
            for name in WAYS
        ],
    )
    if arguments.plot:
        draw(arguments.plot, f"{model}, {len(asks)} requests, lengths: {arguments.lengths}", rates, cpu_rates, last)


def draw(path: Path, title: str, rates: dict[str, float], cpu_rates: dict[str, float], last: dict[str, Watch]) -> None:
    """Left: the tokens per second. Right: where they come from, the rows of each step that gave a wanted token."""
    figure = report.new_figure(f"Continuous against static batching: {title}")
    rate_axes, row_axes = figure.subplots(1, 2, width_ratios=(2, 3))
    places = range(len(rates))
    for shift, (label, values) in enumerate({"per second": rates, "per CPU second": cpu_rates}.items()):
        bars = rate_axes.bar([place + 0.4 * shift for place in places], values.values(), 0.4, label=label)
        rate_axes.bar_label(bars, fmt="%.0f", padding=2, fontsize="small")
    rate_axes.set_xticks([place + 0.2 for place in places], [name.replace(", ", ",\n") for name in rates])
    rate_axes.set(ylabel="tokens asked for", ylim=(0, max(*rates.values(), *cpu_rates.values()) * 1.25))
    rate_axes.legend(loc="upper right")
    for name, watch in last.items():
        seconds, useful = smoothed(watch)
        row_axes.plot(seconds, useful, label=name)
    row_axes.set(
        xlabel="seconds, last run of each", ylabel="useful rows a step (mean of 2 % of the run)", ylim=(0, None)
    )
    row_axes.legend()
    report.save_figure(path, figure)


def smoothed(watch: Watch, pieces: int = 50) -> tuple[list[float], list[float]]:
    size = max(1, len(watch.useful) // pieces)
    starts = range(0, len(watch.useful), size)
    return (
        [statistics.mean(watch.seconds[start : start + size]) for start in starts],
        [statistics.mean(watch.useful[start : start + size]) for start in starts],
    )


if __name__ == "__main__":
    main()
