#!/usr/bin/env python3
"""Measure how long the host needs to issue a step to a GPU, on a machine without one.

    python -m benchmarks.serving.gpu_host_time [--model Llama-3.1-8B] [--capability 90] [--through-triton]

The whole device runner runs over a stand-in for the driver: kernels are compiled as for the GPU and not run. Not
included are what the driver and cuBLAS need, about 3 µs for each launch: their numbers are reported. The times are CPU
times of the only thread, medians. ``--through-triton`` launches each kernel by ``kernel[grid](...)`` for comparison.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import at_least_one, machine, show_table
from benchmarks.stand_in.runner import MODELS, EmptyGraphs, batch, make_runner, model_config
from quire_engine.core.batch import Batch
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.runner.device.graphs import GraphSizes, default_decode_sizes, default_mixed_sizes
from quire_engine.runner.device_runner import DeviceRunner
from quire_kernels.triton_runtime.launch import Launch
from quire_kernels.triton_runtime.stand_in import StandIn, standing_in

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=9, temperature=0.8, top_p=0.9, top_k=50)
CASES: dict[str, tuple[list[int], SamplingParams]] = {
    "1 decode": ([1], GREEDY),
    "32 decodes": ([1] * 32, GREEDY),
    "256 decodes": ([1] * 256, GREEDY),
    "256 decodes, top-p": ([1] * 256, SAMPLED),
    "prompt of 100": ([100], GREEDY),
    "32 decodes + prompt of 128": ([*[1] * 32, 128], GREEDY),
}
KINDS = ("launches", "graphs")
MAX_ROWS, MAX_TOKENS, MAX_MODEL_LEN, CONTEXT = 257, 2048, 8192, 10


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--model", choices=MODELS, default="Llama-3.1-8B")
    options.add_argument("--capability", type=int, default=90, help="the compute capability, such as 90")
    options.add_argument("--steps", type=at_least_one, default=30, help="steps per case")
    options.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="batches (default: all)")
    options.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, help="steps (default: both)")
    options.add_argument("--through-triton", action="store_true", help="use Triton's own launches")
    options.add_argument("--json", type=Path)
    args = options.parse_args()
    torch.set_num_threads(1)
    if args.through_triton:
        Launch._resolve = _through_triton  # type: ignore[method-assign]
    rows = []
    with standing_in(args.capability) as stand_in:
        for kind in args.kinds:
            runner = make_runner(
                model_config(args.model),
                max_rows=MAX_ROWS,
                max_tokens=MAX_TOKENS,
                max_model_len=MAX_MODEL_LEN,
                graph_sizes=GraphSizes() if kind == "launches" else _all_sizes(),
                accelerator=EmptyGraphs(torch.device("cpu")),
            )
            runner.capture_graphs()
            rows += [{"steps": kind, **measure(runner, stand_in, name, args.steps)} for name in args.cases]
            runner.close()
    title = f"host time of a step of {args.model}, sm_{args.capability}: {machine()}"
    show_table(title, list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({"machine": machine(), "model": args.model, "rows": rows}, indent=1))


def measure(runner: DeviceRunner, stand_in: StandIn, name: str, steps: int) -> dict[str, Any]:
    scheduled, params = CASES[name]
    _issue(runner, batch(scheduled, context=CONTEXT, params=params, admits=True))
    step = batch(scheduled, context=CONTEXT, params=params, admits=False)
    _issue(runner, step)
    before = stand_in.launches
    _issue(runner, step)
    launches = stand_in.launches - before
    times = [_issue(runner, step) for _ in range(steps)]
    return {
        "batch": name,
        "Triton launches": launches,
        "ms": round(1e3 * statistics.median(times), 3),
        "least ms": round(1e3 * min(times), 3),
    }


def _issue(runner: DeviceRunner, step: Batch) -> float:
    """Issue a step and its sampling, and return the seconds of this thread."""
    began = time.thread_time()
    runner.execute(step).sample()
    return time.thread_time() - began


def _all_sizes() -> GraphSizes:
    return GraphSizes(decode=default_decode_sizes(MAX_ROWS), mixed=default_mixed_sizes(MAX_TOKENS))


def _through_triton(self: Launch, device: int, arguments: object) -> Any:
    kernel, constants = self.kernel, self.constants
    return lambda grid, arguments, values: kernel[grid](*arguments, **constants)


if __name__ == "__main__":
    main()
