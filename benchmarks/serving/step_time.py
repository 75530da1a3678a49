#!/usr/bin/env python3
"""Milliseconds of a decode step and tokens/s of prefill, in this process: no HTTP, no IPC.

Medians, and beside them the CPU time, which says the same on a machine that does other work as well.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table
from steps import DEMO_MODEL, Bench, StepTime, time_steps, usable_threads

from quire_engine.ipc.process import compute_environment


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32], help="sequences that decode together")
    parser.add_argument(
        "--context", type=int, default=128, help="tokens of a sequence as decoding begins (default 128)"
    )
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt to prefill (default 512)")
    parser.add_argument("--steps", type=int, default=60, help="decode steps per batch size (default 60)")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser.parse_args()


def medians(times: list[StepTime]) -> StepTime:
    return StepTime(
        wall_seconds=statistics.median(time.wall_seconds for time in times),
        cpu_seconds=statistics.median(time.cpu_seconds for time in times),
    )


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    bench = Bench(
        arguments.model, threads=arguments.threads, dtype=arguments.dtype, dummy=arguments.load_format == "dummy"
    )
    table = Table(title="Steps in the engine process", title_justify="left", show_edge=False)
    for column in ("what", "ms", "CPU ms", "tokens/s", "tokens per CPU second"):
        table.add_column(column, justify="left" if column == "what" else "right")
    rows = []

    def add(what: str, tokens: int, time: StepTime) -> None:
        wall, cpu = time.wall_seconds, time.cpu_seconds
        table.add_row(what, f"{wall * 1e3:.2f}", f"{cpu * 1e3:.2f}", f"{tokens / wall:,.0f}", f"{tokens / cpu:,.0f}")
        rows.append({"what": what, "tokens": tokens, "wall_seconds": wall, "cpu_seconds": cpu})

    for batch in arguments.batch:
        engine = bench.decoding(batch, arguments.context, arguments.steps + 5)
        time_steps(engine, 5)
        add(f"decode, {batch} sequences", batch, medians(time_steps(engine, arguments.steps)))
    for prompts in (1, 4):
        bench.prefill(prompts, arguments.prompt)
        runs = [bench.prefill(prompts, arguments.prompt) for _ in range(5)]
        add(f"prefill, {prompts} x {arguments.prompt} tokens", prompts * arguments.prompt, medians(runs))
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{arguments.model.name}, {bench.model.dtype}, weights {bench.model.weights}, context {arguments.context},"
        f" {arguments.threads} threads on {usable_threads()} CPUs",
        style="dim",
        highlight=False,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
