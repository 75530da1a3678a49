#!/usr/bin/env python3
"""Measure how much a decode step slows down while another process is busy, for several ways in which threads wait.

Each way of waiting runs in a process of its own, because thread pools read their environment once. Stretches of steps
alone and stretches next to a process that spins on one core alternate (A B A B). Figures are medians over all
stretches.
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

from benchmarks.report import DEMO_MODEL, ROOT, machine, parser, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench, time_steps
from quire_engine.ipc.process import compute_environment

Environment = dict[str, str]
POLICIES: dict[str, Callable[[int, Environment], Environment]] = {
    "spinning or sleeping, as the engine runs": compute_environment,
    "sleeping": lambda threads, plain: {**compute_environment(threads, plain), "GOMP_SPINCOUNT": "0"},
    "torch's default": lambda threads, plain: {**plain, "OMP_NUM_THREADS": str(threads)},
}
_SPIN = "while True: pass"


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the median step alone and next to a busy process, in seconds. Runs in a process of its own."""
    bench = Bench(arguments.model, threads=arguments.threads, dummy=arguments.load_format == "dummy")
    total = 2 * arguments.rounds * arguments.steps
    engine = bench.decoding(arguments.batch, arguments.context, total + arguments.steps)
    time_steps(engine, arguments.steps)
    alone, with_neighbour = [], []
    for _ in range(arguments.rounds):
        alone += time_steps(engine, arguments.steps)
        neighbour = subprocess.Popen([sys.executable, "-c", _SPIN])
        try:
            sleep(0.3)
            with_neighbour += time_steps(engine, arguments.steps)
        finally:
            neighbour.kill()
            neighbour.wait()
        sleep(0.1)
    return {
        "alone": statistics.median(step.wall_seconds for step in alone),
        "with_neighbour": statistics.median(step.wall_seconds for step in with_neighbour),
    }


def run_policy(arguments: argparse.Namespace, policy: Callable[[int, Environment], Environment]) -> dict[str, float]:
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    environment = policy(arguments.threads, unset)
    command = [sys.executable, "-m", "benchmarks.serving.busy_neighbour", *sys.argv[1:], "--inner"]
    done = subprocess.run(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the measuring process ended with code {done.returncode}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, plot=False)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    options.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    options.add_argument("--batch", type=int, default=8, help="sequences that decode (default 8)")
    options.add_argument("--context", type=int, default=128, help="their tokens at the start (default 128)")
    options.add_argument("--rounds", type=int, default=5, help="stretches of each kind (default 5)")
    options.add_argument("--steps", type=int, default=60, help="steps per stretch (default 60)")
    options.add_argument("--threads", type=int, default=len(usable_cpus()))
    options.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.inner:
        print(json.dumps(measure(arguments)))
        return
    lines, rows = [], []
    for name, policy in POLICIES.items():
        result = run_policy(arguments, policy)
        ratio = result["with_neighbour"] / result["alone"]
        lines.append([name, f"{result['alone'] * 1e3:.2f}", f"{result['with_neighbour'] * 1e3:.2f}", f"{ratio:.2f}"])
        rows.append({"waits": name, **result, "ratio": ratio})
    note = (
        f"{arguments.model.name}, {arguments.batch} sequences of {arguments.context} tokens,"
        f" {arguments.threads} threads, medians of {arguments.rounds} stretches of {arguments.steps} steps"
    )
    columns = ["threads wait by", "alone ms", "next to a busy process ms", "ratio"]
    show_table("A decode step next to a busy process", columns, lines, (note, machine()))
    save(arguments.json, rows)


if __name__ == "__main__":
    main()
