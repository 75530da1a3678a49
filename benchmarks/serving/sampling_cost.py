#!/usr/bin/env python3
"""Milliseconds that drawing tokens costs a step, by what the requests ask for; greedy drawing is the measure.

No model: random logits of a chosen vocabulary, restored before each draw (the time for that is not counted).
"""

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from rich.console import Console
from rich.table import Table

from quire_engine.core.batch import Admission
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.ipc.process import compute_environment

PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}
BIAS = {"logit_bias": tuple((token, 1.5) for token in range(100, 150))}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top_p": {"top_p": 0.9},
    "top_k, top_p": {"top_k": 50, "top_p": 0.9},
    "typical_p": {"typical_p": 0.9},
    "greedy, penalties": {"temperature": 0.0, **PENALTIES},
    "greedy, logit_bias": {"temperature": 0.0, **BIAS},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "penalties, logit_bias, top_p": {"top_p": 0.9, **PENALTIES, **BIAS},
    "all of these, 5 logprobs": {"top_k": 50, "top_p": 0.9, "logprobs": 5, **PENALTIES, **BIAS},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256, help="sequences that draw together (default 256)")
    parser.add_argument("--vocabulary", type=int, default=128_256, help="tokens (default 128256, Llama 3's)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt (default 512)")
    parser.add_argument("--steps", type=int, default=9, help="draws per case (default 9); the median is told")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser.parse_args()


def sampler_of(rows: int, vocabulary: int, prompt: int, params: SamplingParams) -> Any:
    from quire_engine.runner.sampler import Sampler

    chance = random.Random(1)
    sampler = Sampler(max_rows=rows, vocab_size=vocabulary)
    for row in range(rows):
        tokens = [chance.randrange(vocabulary) for _ in range(prompt)]
        sampler.admit(
            Admission(
                row=row, prompt_token_ids=tokens, output_token_ids=[], params=params, seed=row, eos_token_ids=(0,)
            )
        )
    return sampler


def measure(draw: Callable[[int], None], restore: Callable[[], object], steps: int) -> dict[str, float]:
    wall, cpu = [], []
    for step in range(steps + 1):  # the first compiles, and is left out
        restore()
        began, began_cpu = perf_counter(), process_time()
        draw(step)
        wall.append(perf_counter() - began)
        cpu.append(process_time() - began_cpu)
    return {"wall_ms": 1e3 * statistics.median(wall[1:]), "cpu_ms": 1e3 * statistics.median(cpu[1:])}


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    import numpy as np
    import torch

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    original = 3.0 * torch.randn(arguments.rows, arguments.vocabulary)
    logits = torch.empty_like(original)
    rows = np.arange(arguments.rows)
    results = []
    for name in arguments.only:
        params = SamplingParams(max_tokens=1000, **CASES[name])
        sampler = sampler_of(arguments.rows, arguments.vocabulary, arguments.prompt, params)

        def draw(step: int, sampler: Any = sampler) -> None:
            sampler.draw(logits, rows, np.full(len(rows), arguments.prompt + step))

        times = measure(draw, lambda: logits.copy_(original), arguments.steps)
        results.append({"what": name, **times})
    show(arguments, results)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def show(arguments: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    table = Table(title="Drawing tokens", title_justify="left", show_edge=False)
    for column in ("what every row asks for", "ms a step", "CPU ms", "CPU, of greedy"):
        table.add_column(column, justify="left" if column.startswith("what") else "right")
    base = results[0]["cpu_ms"]
    for row in results:
        table.add_row(row["what"], f"{row['wall_ms']:.1f}", f"{row['cpu_ms']:.1f}", f"{row['cpu_ms'] / base:.1f}")
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{arguments.rows} rows, {arguments.vocabulary:,} tokens, prompts of {arguments.prompt},"
        f" {arguments.threads} threads",
        style="dim",
        highlight=False,
    )


if __name__ == "__main__":
    main()
