#!/usr/bin/env python3
"""Measure ranks and stages on a CPU: their speed compared with one process.

Every process has one thread and a core of its own as long as the machine has enough; the one process is pinned to one
core. Runs of one process, of two ranks and of two stages alternate.
"""

import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.models.random_model import SHAPES, model_folder
from benchmarks.report import at_least_one, parser, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench
from quire_engine.config import ParallelOptions
from quire_engine.ipc.process import compute_environment


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The tokens per second of one way to run the model, and their ratios to one process in the same round."""

    work: str
    ranks: str
    alone_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    lowest_ratio: float


def pin_processes() -> None:
    """Give this process and the ranks that it has started a core each, as long as there are enough.

    A rank that waits yields its core, so that the system may leave two ranks on one core.
    """
    cpus = usable_cpus()
    with suppress(AttributeError, FileNotFoundError):  # only Linux pins processes and lists children
        for child in Path("/proc/self/task").glob("*/children"):
            for pid in child.read_text().split():
                os.sched_setaffinity(int(pid), {cpus[1 % len(cpus)]})
        os.sched_setaffinity(0, {cpus[0]})


def decode(bench: Bench, sequences: int, steps: int) -> float:
    """Return the tokens per second of sequences that only decode."""
    engine = bench.decoding(sequences, context=32, steps=steps)
    began = perf_counter()
    done = 0
    while engine.has_work:
        step = engine.step()
        done += 0 if step is None else len(step.keys)
    return done / (perf_counter() - began)


def compute_prompts(bench: Bench, prompts: int, length: int) -> float:
    """Return the tokens per second of prompts without answers."""
    return prompts * length / bench.prefill(prompts, length).wall_seconds


def compare(benches: dict[str, Bench], work: str, measure: Callable[[Bench], float], runs: int) -> list[Speed]:
    """Run all ways alternately, and return the medians; the first one is one process."""
    alone, *others = benches
    rounds = [{ranks: measure(bench) for ranks, bench in benches.items()} for _ in range(runs)]
    found = []
    for ranks in others:
        ratios = [speeds[ranks] / speeds[alone] for speeds in rounds]
        found.append(
            Speed(
                work=work,
                ranks=ranks,
                alone_tokens_per_second=statistics.median(speeds[alone] for speeds in rounds),
                tokens_per_second=statistics.median(speeds[ranks] for speeds in rounds),
                ratio=statistics.median(ratios),
                lowest_ratio=min(ratios),
            )
        )
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SHAPES, default="300M")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 16, 64])
    options.add_argument("--prompts", type=at_least_one, default=8, help="prompts of 256 tokens")
    options.add_argument("--steps", type=at_least_one, default=32)
    options.add_argument("--runs", type=at_least_one, default=3)
    arguments = options.parse_args()
    os.environ.update(compute_environment(1, os.environ))
    ways = {
        "one process": ParallelOptions(),
        "two ranks": ParallelOptions(tensor=2),
        "two stages": ParallelOptions(pipeline=2),
    }
    rows: list[Speed] = []
    with model_folder(SHAPES[arguments.shape]) as folder:
        benches = {
            name: Bench(folder, threads=1, dummy=True, kv_cache_bytes=1 << 28, parallel=parallel)
            for name, parallel in ways.items()
        }
        pin_processes()
        for count in arguments.sequences:

            def decoding(bench: Bench, count: int = count) -> float:
                return decode(bench, count, arguments.steps)

            rows += compare(benches, f"decode {count}", decoding, arguments.runs)
        rows += compare(
            benches,
            f"{arguments.prompts} prompts of 256",
            lambda bench: compute_prompts(bench, arguments.prompts, 256),
            arguments.runs,
        )
        for bench in benches.values():
            bench.model.runner.close()
    show_table(
        f"{arguments.shape}, one thread per process, one process on one core",
        ["work", "by", "tokens/s alone", "tokens/s", "ratio", "lowest"],
        [
            [
                row.work,
                row.ranks,
                f"{row.alone_tokens_per_second:.0f}",
                f"{row.tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
                f"{row.lowest_ratio:.2f}",
            ]
            for row in rows
        ],
    )
    save(arguments.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
