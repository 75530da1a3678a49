#!/usr/bin/env python3
"""Measure what --max-generation-stall costs and saves: clients with long prompts and answers, without HTTP and IPC.

A constant number of requests is under way; the next one begins when one ends. Runs with different bounds alternate,
and the table shows medians. Inter-token latency is that of all answers; tokens/s counts prompts and answers.
"""

import argparse
import os
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.report import DEMO_MODEL, machine, parser, save, show_table, usable_cpus
from benchmarks.serving.comparison.client import Workload, parse_workload
from benchmarks.serving.in_process import Clients, Load
from benchmarks.serving.steps import Bench
from quire_engine.engine import make_engine
from quire_engine.ipc.process import compute_environment


@dataclass(frozen=True, kw_only=True)
class Result:
    max_generation_stall_seconds: float
    """The bound; 0 means no bound."""
    itl_p50_seconds: float
    itl_p99_seconds: float
    ttft_median_seconds: float
    total_tokens_per_second: float


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    options.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    options.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto")
    options.add_argument(
        "--workload", type=parse_workload, default="1024/128@8", help="input/output@concurrency (default 1024/128@8)"
    )
    options.add_argument("--requests", type=int, default=24, help="requests of each run (default 24)")
    options.add_argument("--runs", type=int, default=1, help="runs with each bound (default 1)")
    options.add_argument("--stall", type=float, nargs="+", default=[0.0, 0.25], help="bounds in seconds; 0 means none")
    options.add_argument("--threads", type=int, default=len(usable_cpus()))
    return options.parse_args()


def measure(bench: Bench, stall: float, workload: Workload, requests: int) -> Result:
    scheduler = replace(bench.config.scheduler, max_generation_stall_seconds=stall)
    engine = make_engine(bench.model, scheduler=scheduler)
    clients = Clients(engine, vocab_size=bench.model.vocab_size, max_model_len=bench.model.traits.max_model_len)
    sizes = {"concurrency": workload.concurrency, "prompt": workload.input_tokens, "output": workload.output_tokens}
    served = clients.serve(Load(requests=requests, **sizes))
    return Result(
        max_generation_stall_seconds=stall,
        itl_p50_seconds=served.itl.median,
        itl_p99_seconds=served.itl.p99,
        ttft_median_seconds=served.ttft.median,
        total_tokens_per_second=served.total_tokens_per_second,
    )


def medians(results: list[Result]) -> Result:
    """Return the median of each figure over runs with the same bound."""
    rows = [asdict(result) for result in results]
    return Result(**{name: statistics.median(row[name] for row in rows) for name in rows[0]})


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    bench = Bench(
        arguments.model, threads=arguments.threads, dtype=arguments.dtype, dummy=arguments.load_format == "dummy"
    )
    workload: Workload = arguments.workload
    if workload.input_tokens + workload.output_tokens > bench.model.traits.max_model_len:
        raise SystemExit(f"--workload: the model's longest sequence has {bench.model.traits.max_model_len} tokens")
    measure(bench, 0.0, workload, workload.concurrency)  # touches the pages of the cache for the first time
    runs = [
        [measure(bench, stall, workload, arguments.requests) for stall in arguments.stall]
        for _ in range(arguments.runs)
    ]
    results = [medians([run[place] for run in runs]) for place in range(len(arguments.stall))]
    lines = [
        [
            f"{result.max_generation_stall_seconds:g} s" if result.max_generation_stall_seconds else "none",
            *(f"{seconds * 1e3:,.1f} ms" for seconds in (result.itl_p50_seconds, result.itl_p99_seconds)),
            f"{result.ttft_median_seconds * 1e3:,.0f} ms",
            f"{result.total_tokens_per_second:,.0f}",
        ]
        for result in results
    ]
    note = (
        f"{arguments.model.name}, {bench.model.dtype}, {workload}, {arguments.requests} requests,"
        f" {arguments.runs} interleaved runs, {arguments.threads} threads"
    )
    columns = ["bound", "ITL p50", "ITL p99", "TTFT p50", "total tokens/s"]
    show_table("The bound on generation stalls", columns, lines, (note, machine()))
    save(arguments.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
