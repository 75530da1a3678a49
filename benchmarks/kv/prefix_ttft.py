#!/usr/bin/env python3
"""What a shared prefix saves of the time to first token (TTFT), with a real model in this process.

For each share of the prompt: an engine with an empty cache answers one prompt (cold), then another one that begins with
the same tokens and goes on with others (warm). So cold and warm runs alternate, whatever else the machine does. Prompts
are random, and new each time. Figures are medians; the ratios in CPU time leave out waiting for other processes.
Only whole blocks can be shared, which is what *found* counts.
"""

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import report
from engines import Bench, add_model_options, ask, load, random_tokens
from report import at_least_one

from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.engine import Engine

GOAL = 1 / 5
GOAL_SHARE = 90


@dataclass(frozen=True, kw_only=True)
class First:
    """A prompt's way to its first token."""

    wall_seconds: float
    cpu_seconds: float
    num_cached: int


@dataclass(frozen=True, kw_only=True)
class Row:
    share: int
    found: int
    cold: float
    warm: float
    ratio: float
    cpu_ratio: float


def time_first(engine: Engine, key: int, prompt: list[int]) -> First:
    began, began_cpu = perf_counter(), process_time()
    ask(engine, key, prompt, 1)
    finished = []
    while engine.has_work:
        step = engine.step()
        finished += [] if step is None else step.output.finished
    return First(
        wall_seconds=perf_counter() - began,
        cpu_seconds=process_time() - began_cpu,
        num_cached=finished[0].num_cached_tokens,
    )


def measure(bench: Bench, share: int, length: int, chance: random.Random) -> tuple[First, First]:
    engine = bench.engine()
    vocab_size = bench.model.vocab_size
    shared = length * share // 100
    cold_prompt = random_tokens(chance, length, vocab_size)
    rest = random_tokens(chance, length - shared, vocab_size)
    if shared < length:
        rest[0] = (cold_prompt[shared] + 1) % vocab_size  # so that they part exactly there
    cold = time_first(engine, 0, cold_prompt)
    return cold, time_first(engine, 1, cold_prompt[:shared] + rest)


def summarize(share: int, pairs: Sequence[tuple[First, First]]) -> Row:
    cold = statistics.median(cold.wall_seconds for cold, _ in pairs)
    warm = statistics.median(warm.wall_seconds for _, warm in pairs)
    cold_cpu = statistics.median(cold.cpu_seconds for cold, _ in pairs)
    warm_cpu = statistics.median(warm.cpu_seconds for _, warm in pairs)
    found = pairs[0][1].num_cached
    return Row(share=share, found=found, cold=cold, warm=warm, ratio=warm / cold, cpu_ratio=warm_cpu / cold_cpu)


def percent(text: str) -> int:
    if not text.isdigit() or int(text) > 100:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number of percent, 0 to 100")
    return int(text)


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--prompt", type=at_least_one, default=2000, help="tokens (default 2,000)")
    parser.add_argument(
        "--shares", type=percent, nargs="+", default=[0, 25, 50, 75, 90, 95, 99], metavar="PERCENT", help="of it"
    )
    parser.add_argument("--runs", type=at_least_one, default=5, help="of each share (default 5)")
    add_model_options(parser, default="smollm2-135m")
    parser.add_argument("--kv-cache-mib", type=at_least_one, default=256, help="room for two prompts (default 256)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    bench = load(
        arguments,
        cache=CacheOptions(kv_cache_memory_bytes=arguments.kv_cache_mib * 2**20),
        scheduler=SchedulerOptions(max_num_seqs=4),
        max_model_len=arguments.prompt + 1,
    )
    chance = random.Random(1)
    pairs: dict[int, list[tuple[First, First]]] = {share: [] for share in arguments.shares}
    with report.progress() as progress:
        task = progress.add_task("runs", total=arguments.runs * len(pairs) + 1)
        measure(bench, 50, arguments.prompt, chance)  # warm-up
        progress.advance(task)
        for _ in range(arguments.runs):
            for share, measured in pairs.items():
                measured.append(measure(bench, share, arguments.prompt, chance))
                progress.advance(task)
    present(arguments, str(bench), [summarize(share, measured) for share, measured in pairs.items()])


def present(arguments: argparse.Namespace, model: str, rows: Sequence[Row]) -> None:
    report.show(
        f"Time to first token of {arguments.prompt:,} tokens, part of them shared",
        ["shared", "found", "cold", "warm", "warm / cold", "in CPU time"],
        [
            [
                f"{row.share} %",
                f"{row.found:,}",
                f"{row.cold * 1e3:,.0f} ms",
                f"{row.warm * 1e3:,.0f} ms",
                f"{row.ratio:.3f}",
                f"{row.cpu_ratio:.3f}",
            ]
            for row in rows
        ],
        notes=[
            f"{model}; medians of {arguments.runs} runs, cold and warm by turns; the goal is"
            f" warm / cold ≤ {GOAL:g} at {GOAL_SHARE} %"
        ],
    )
    report.save(
        arguments.json,
        [
            {
                "share": row.share / 100,
                "found_tokens": row.found,
                "cold_seconds": row.cold,
                "warm_seconds": row.warm,
                "ratio": row.ratio,
                "cpu_ratio": row.cpu_ratio,
            }
            for row in rows
        ],
    )
    if arguments.plot:
        draw(arguments.plot, f"{model}, {arguments.prompt:,} tokens", rows)


def draw(path: Path, title: str, rows: Sequence[Row]) -> None:
    figure = report.new_figure(f"Time to first token with a shared prefix: {title}", width=8)
    axes = figure.subplots()
    shares = [row.share for row in rows]
    axes.plot(shares, [row.cold * 1e3 for row in rows], "o-", label="cold: nothing in the cache")
    axes.plot(shares, [row.warm * 1e3 for row in rows], "o-", label="warm: the shared part is in the cache")
    cold = statistics.median(row.cold for row in rows) * 1e3
    axes.plot([0, 100], [cold, 0], color="gray", linestyle=":", label="in proportion to the tokens left")
    axes.plot([GOAL_SHARE], [cold * GOAL], "k_", markersize=16, label=f"goal: at most {GOAL:g} of cold")
    axes.set(xlabel="% of the prompt shared", ylabel="milliseconds, median", xlim=(-2, 102))
    axes.set_ylim(0, max(row.cold for row in rows) * 1e3 * 1.1)
    axes.legend(loc="lower left")
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
