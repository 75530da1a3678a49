#!/usr/bin/env python3
"""Measure tensor parallelism on a CPU: sums over shared memory, and decoding by several ranks and by one process.

Every process has one thread and a core of its own as long as the machine has enough. Sums are timed on rank 0, from the
call to its end, while all ranks add one tensor after another. Decoding runs of one process and of the ranks alternate.
"""

import mmap
import multiprocessing
import os
import statistics
from dataclasses import asdict, dataclass
from time import perf_counter

from benchmarks.models.shapes import SHAPES, model_folder
from benchmarks.report import at_least_one, machine, parser, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench
from quire_engine.config import ParallelOptions
from quire_engine.ipc.process import compute_environment

ROWS = (1, 32, 512)
_WARM_UP = 20


@dataclass(frozen=True, kw_only=True)
class Sum:
    rows: int
    columns: int
    median_microseconds: float
    least_microseconds: float


@dataclass(frozen=True, kw_only=True)
class Decoding:
    sequences: int
    alone_tokens_per_second: float
    ranks_tokens_per_second: float
    ratio: float
    lowest_ratio: float


def time_sums(ranks: int, columns: int, repeats: int) -> list[Sum]:
    """Return the times of sums of bfloat16 on rank 0; the other ranks are forked."""
    from quire_kernels.all_reduce import shared_bytes

    memory = mmap.mmap(-1, shared_bytes(ranks))
    others = [
        multiprocessing.get_context("fork").Process(target=_sums, args=(memory, rank, ranks, columns, repeats))
        for rank in range(1, ranks)
    ]
    for other in others:
        other.start()
    found = _sums(memory, 0, ranks, columns, repeats)
    for other in others:
        other.join()
    return found


def _sums(memory: mmap.mmap, rank: int, ranks: int, columns: int, repeats: int) -> list[Sum]:
    import numpy as np
    import torch

    from quire_kernels.all_reduce import SharedRings

    cpus = usable_cpus()
    if len(cpus) >= ranks:
        os.sched_setaffinity(0, {cpus[rank]})
    torch.set_num_threads(1)
    side = SharedRings(np.frombuffer(memory, dtype=np.uint8), rank=rank, ranks=ranks)
    found = []
    for rows in ROWS:
        x = torch.zeros((rows, columns), dtype=torch.bfloat16)
        times = []
        for _ in range(_WARM_UP + repeats):
            began = perf_counter()
            side.all_reduce(x)
            times.append((perf_counter() - began) * 1e6)
        kept = times[_WARM_UP:]
        found.append(
            Sum(
                rows=rows,
                columns=columns,
                median_microseconds=statistics.median(kept),
                least_microseconds=min(kept),
            )
        )
    if len(cpus) >= ranks:
        os.sched_setaffinity(0, cpus)
    return found


def tokens_per_second(bench: Bench, sequences: int, steps: int) -> float:
    engine = bench.decoding(sequences, context=32, steps=steps)
    began = perf_counter()
    done = 0
    while engine.has_work:
        step = engine.step()
        done += 0 if step is None else len(step.output.keys)
    return done / (perf_counter() - began)


def compare(alone: Bench, shared: Bench, sequences: int, steps: int, runs: int) -> Decoding:
    """Run both alternately, and return the medians."""
    pairs = [
        (tokens_per_second(alone, sequences, steps), tokens_per_second(shared, sequences, steps)) for _ in range(runs)
    ]
    ratios = [ranks / one for one, ranks in pairs]
    return Decoding(
        sequences=sequences,
        alone_tokens_per_second=statistics.median(one for one, _ in pairs),
        ranks_tokens_per_second=statistics.median(ranks for _, ranks in pairs),
        ratio=statistics.median(ratios),
        lowest_ratio=min(ratios),
    )


def main() -> None:
    options = parser(__doc__, plot=False)
    options.add_argument("--ranks", type=at_least_one, default=2)
    options.add_argument("--shape", choices=SHAPES, default="300M")
    options.add_argument("--columns", type=at_least_one, default=4096, help="of the tensors that are added")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 16])
    options.add_argument("--steps", type=at_least_one, default=64)
    options.add_argument("--runs", type=at_least_one, default=5)
    options.add_argument("--repeats", type=at_least_one, default=1000, help="sums of each size")
    arguments = options.parse_args()
    os.environ.update(compute_environment(1, os.environ))
    sums = time_sums(arguments.ranks, arguments.columns, arguments.repeats)
    show_table(
        f"sums of bfloat16 by {arguments.ranks} ranks on {machine()}",
        ["tensor", "median µs", "least µs"],
        [
            [f"[{one.rows}, {one.columns}]", f"{one.median_microseconds:.1f}", f"{one.least_microseconds:.1f}"]
            for one in sums
        ],
    )
    parallel = ParallelOptions(tensor=arguments.ranks)
    with model_folder(SHAPES[arguments.shape]) as folder:
        alone = Bench(folder, threads=1, dummy=True, kv_cache_bytes=1 << 28)
        shared = Bench(folder, threads=1, dummy=True, kv_cache_bytes=1 << 28, parallel=parallel)
        rows = [compare(alone, shared, each, arguments.steps, arguments.runs) for each in arguments.sequences]
        shared.model.runner.close()
    show_table(
        f"decoding, {arguments.shape}, one thread per process",
        ["sequences", "tokens/s alone", f"tokens/s, {arguments.ranks} ranks", "ratio", "lowest"],
        [
            [
                str(row.sequences),
                f"{row.alone_tokens_per_second:.0f}",
                f"{row.ranks_tokens_per_second:.0f}",
                f"{row.ratio:.2f}",
                f"{row.lowest_ratio:.2f}",
            ]
            for row in rows
        ],
    )
    save(arguments.json, [*(asdict(one) for one in sums), *(asdict(row) for row in rows)])


if __name__ == "__main__":
    main()
