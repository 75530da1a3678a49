#!/usr/bin/env python3
"""What one busy process beside the engine does to its decode step, by how threads wait for one another.

Each policy runs in a process of its own, since thread pools read their environment once. In it, stretches of steps
alone and beside a process that spins on one core alternate (A B A B); figures are medians over all stretches.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

from rich.console import Console
from rich.table import Table
from steps import DEMO_MODEL, Bench, time_steps, usable_threads

from quire_engine.ipc.process import compute_environment

Environment = dict[str, str]
POLICIES: dict[str, Callable[[int, Environment], Environment]] = {
    "spinning or sleeping, as the engine runs": compute_environment,
    "sleeping": lambda threads, plain: {**compute_environment(threads, plain), "GOMP_SPINCOUNT": "0"},
    "torch's default": lambda threads, plain: {**plain, "OMP_NUM_THREADS": str(threads)},
}
_SPIN = "while True: pass"


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """In a fresh process: median step alone and beside a neighbour, in seconds."""
    bench = Bench(arguments.model, threads=arguments.threads, dummy=arguments.load_format == "dummy")
    total = 2 * arguments.rounds * arguments.steps
    engine = bench.decoding(arguments.batch, arguments.context, total + arguments.steps)
    time_steps(engine, arguments.steps)
    alone, beside = [], []
    for _ in range(arguments.rounds):
        alone += time_steps(engine, arguments.steps)
        neighbour = subprocess.Popen([sys.executable, "-c", _SPIN])
        try:
            sleep(0.3)
            beside += time_steps(engine, arguments.steps)
        finally:
            neighbour.kill()
            neighbour.wait()
        sleep(0.1)
    return {
        "alone": statistics.median(step.wall_seconds for step in alone),
        "beside": statistics.median(step.wall_seconds for step in beside),
    }


def run_policy(arguments: argparse.Namespace, policy: Callable[[int, Environment], Environment]) -> dict[str, float]:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment = policy(arguments.threads, unset)
    command = [sys.executable, __file__, *sys.argv[1:], "--inner"]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the measuring process ended with code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--batch", type=int, default=8, help="sequences that decode (default 8)")
    parser.add_argument("--context", type=int, default=128, help="their tokens at the start (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="stretches of each kind (default 5)")
    parser.add_argument("--steps", type=int, default=60, help="per stretch (default 60)")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.inner:
        print(json.dumps(measure(arguments)))
        return
    table = Table(title="A decode step beside one busy process", title_justify="left", show_edge=False)
    for column in ("threads wait by", "alone ms", "beside it ms", "ratio"):
        table.add_column(column, justify="left" if column == "threads wait by" else "right")
    rows = []
    for name, policy in POLICIES.items():
        result = run_policy(arguments, policy)
        ratio = result["beside"] / result["alone"]
        table.add_row(name, f"{result['alone'] * 1e3:.2f}", f"{result['beside'] * 1e3:.2f}", f"{ratio:.2f}")
        rows.append({"waits": name, **result, "ratio": ratio})
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{arguments.model.name}, {arguments.batch} sequences of {arguments.context} tokens,"
        f" {arguments.threads} threads on {usable_threads()} CPUs,"
        f" medians of {arguments.rounds} stretches of {arguments.steps} steps",
        style="dim",
        highlight=False,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
