#!/usr/bin/env python3
"""Measure the Python part of a decode step: schedule, build the inputs, commit, encode the message to the API process.

No model runs: tokens are constant, and the rest is what the engine process does. Times are medians over the steps of
the thread's CPU time, so that waiting for a busy machine does not count. Sequences cross block boundaries and publish
prefixes as in production. The cost must not depend on the queue's length; it may grow with the running sequences.
"""

import gc
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import thread_time

import msgspec

from benchmarks import report
from benchmarks.report import at_least_one
from quire_engine.core.batch import Batch, RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.options import ModelTraits, SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler
from quire_engine.core.sequence import Request

BLOCK_SIZE = 16
PARTS = ("schedule", "inputs", "commit", "encode")
EOS, SAMPLED = 2, 7


@dataclass(frozen=True, kw_only=True)
class Case:
    running: int
    queued: int


def make_scheduler(case: Case, *, caching: bool, steps: int) -> tuple[Scheduler, KVCacheLayout]:
    chance = random.Random(1)
    blocks = case.running * (-(-(300 + steps) // BLOCK_SIZE) + 1) * 2
    layout = KVCacheLayout(block_size=BLOCK_SIZE, groups=(KVCacheGroup(layers=(0,), num_blocks=blocks),))
    options = SchedulerOptions(
        max_num_seqs=case.running,
        max_num_batched_tokens=max(8192, case.running),
        enable_prefix_caching=caching,
    )
    scheduler = Scheduler(options, ModelTraits(max_model_len=4096, eos_token_ids=(EOS,)), layout)
    for key in range(case.running + case.queued):
        prompt = [chance.randrange(3, 30_000) for _ in range(chance.randrange(100, 300))] if key < case.running else [1]
        params = SamplingParams(max_tokens=3000)
        assert scheduler.add(Request(key=key, prompt_token_ids=prompt, params=params, seed=key)) is None
    return scheduler, layout


def input_builder(layout: KVCacheLayout, rows: int) -> Callable[[Batch], object]:
    """Return what the runner does before the model runs. Imports torch."""
    import torch

    from quire_engine.runner.accelerator import CpuAccelerator
    from quire_engine.runner.captured import GraphSizes
    from quire_engine.runner.cpu_passes import CpuPasses
    from quire_engine.runner.inputs import Rows, step_columns
    from quire_engine.runner.logprobs import logits_rows
    from quire_engine.runner.passes import PassSizes
    from quire_engine.runner.staging import HostToDeviceBatch
    from quire_engine.runner.verification import draws_of

    accelerator, sizes = CpuAccelerator(), PassSizes(rows=rows, tokens=8192, logits=rows, draws=rows)
    state = Rows(layout, max_rows=rows, max_blocks=4096 // BLOCK_SIZE + 1, device=accelerator.device)
    passes = CpuPasses(
        lambda inputs, caches: torch.empty(0),
        (),
        layout,
        state,
        accelerator=accelerator,
        sizes=sizes,
        graph_sizes=GraphSizes(),
    )

    def prepare(batch: Batch) -> object:
        transfer = HostToDeviceBatch(accelerator)
        state.stage(batch, transfer)
        columns = step_columns(batch, state.tables, BLOCK_SIZE)
        return passes.stage(columns, logits_rows(batch, columns.ends), draws_of(batch, columns), transfer)

    return prepare


def measure(case: Case, *, steps: int, caching: bool, with_inputs: bool) -> dict[str, float]:
    """Return the median seconds of each part."""
    scheduler, layout = make_scheduler(case, caching=caching, steps=steps)
    prepare = input_builder(layout, case.running) if with_inputs else (lambda batch: None)
    encoder = msgspec.msgpack.Encoder()
    seconds: dict[str, list[float]] = {part: [] for part in PARTS}
    gc.collect()
    gc.freeze()
    while len(seconds["encode"]) < steps:
        marks = [thread_time()]
        batch = scheduler.schedule()
        assert batch is not None
        marks.append(thread_time())
        prepare(batch)
        marks.append(thread_time())
        output = scheduler.commit(batch, RunnerOutput(token_ids=[SAMPLED] * sum(batch.samples)))
        marks.append(thread_time())
        encoder.encode(output)
        marks.append(thread_time())
        if batch.num_tokens == case.running:  # every prompt is computed
            for part, earlier, later in zip(PARTS, marks, marks[1:], strict=False):
                seconds[part].append(later - earlier)
    gc.unfreeze()
    return {part: statistics.median(times) for part, times in seconds.items()}


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--running", type=at_least_one, nargs="+", default=[64, 256, 1024, 2048])
    parser.add_argument("--queued", type=int, nargs="+", default=[0, 10_000], help="requests that wait in the queue")
    parser.add_argument("--steps", type=at_least_one, default=200)
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--no-inputs", action="store_true", help="skip the runner's part, and torch")
    arguments = parser.parse_args()
    rows = []
    for running in arguments.running:
        for queued in arguments.queued:
            parts = measure(
                Case(running=running, queued=queued),
                steps=arguments.steps,
                caching=not arguments.no_prefix_caching,
                with_inputs=not arguments.no_inputs,
            )
            rows.append({"running": running, "queued": queued, **{part: parts[part] * 1e3 for part in PARTS}})
    report.show_table(
        "Milliseconds of Python in a decode step",
        ["running", "queued", *PARTS, "total", "per sequence"],
        [
            [
                f"{row['running']:,}",
                f"{row['queued']:,}",
                *(f"{row[part]:.3f}" for part in PARTS),
                f"{sum(row[part] for part in PARTS):.3f}",
                f"{sum(row[part] for part in PARTS) / row['running'] * 1e3:.2f} µs",
            ]
            for row in rows
        ],
        notes=[f"medians of {arguments.steps} steps, CPU time of the thread", report.machine()],
    )
    report.save(arguments.json, rows)


if __name__ == "__main__":
    main()
