#!/usr/bin/env python3
"""Measure ranks on a CPU: sums between processes, and the speed of ranks and stages compared with one process.

Every process has one thread and a core of its own as long as the machine has enough; the one process is pinned to one
core. Sums are timed on rank 0, from the call to its end, while all ranks add one tensor after another: over shared
memory, and as between nodes over TCP on this machine, by quire's streams and by gloo. Runs of one process, of two
ranks and of two stages alternate.
"""

import multiprocessing
import os
import socket
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.models.shapes import SHAPES, model_folder
from benchmarks.report import at_least_one, machine, parser, save, show_table, usable_cpus
from benchmarks.serving.steps import Bench
from quire_engine.config import ParallelOptions
from quire_engine.ipc.process import compute_environment

ROWS = (1, 32, 512)
_WARM_UP = 20


@dataclass(frozen=True, kw_only=True)
class Sum:
    way: str
    rows: int
    columns: int
    median_microseconds: float
    least_microseconds: float


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The tokens per second of one way to run the model, and their ratios to one process in the same round."""

    work: str
    ranks: str
    alone_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    lowest_ratio: float


def time_sums(way: str, columns: int, repeats: int) -> list[Sum]:
    """Return the times of sums of bfloat16 by two ranks on rank 0; the other rank is forked."""
    with tempfile.TemporaryDirectory() as folder:
        memory = os.memfd_create("sums")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            arguments = (way, 1, memory, port, folder, columns, repeats)
            other = multiprocessing.get_context("fork").Process(target=_sums, args=arguments)
            other.start()
            connection, _ = server.accept()
        found = _sums(way, 0, memory, connection, folder, columns, repeats)
        other.join()
        os.close(memory)
    return found


def _sums(way: str, rank: int, memory: int, peer: Any, folder: str, columns: int, repeats: int) -> list[Sum]:
    import torch

    cpus = usable_cpus()
    if len(cpus) >= 2:
        os.sched_setaffinity(0, {cpus[rank]})
    torch.set_num_threads(1)
    connection = socket.create_connection(("127.0.0.1", peer)) if isinstance(peer, int) else peer
    all_reduce = _all_reduce(way, rank, memory, connection, folder)
    found = []
    for rows in ROWS:
        x = torch.zeros((rows, columns), dtype=torch.bfloat16)
        times = []
        for _ in range(_WARM_UP + repeats):
            began = perf_counter()
            all_reduce(x)
            times.append((perf_counter() - began) * 1e6)
        kept = times[_WARM_UP:]
        found.append(
            Sum(
                way=way,
                rows=rows,
                columns=columns,
                median_microseconds=statistics.median(kept),
                least_microseconds=min(kept),
            )
        )
    connection.close()
    if len(cpus) >= 2:
        os.sched_setaffinity(0, cpus)
    return found


def _all_reduce(way: str, rank: int, memory: int, connection: socket.socket, folder: str) -> Callable[[Any], Any]:
    import torch.distributed

    from quire_engine.runner.parallel.shared_memory import SharedMemoryGroup
    from quire_engine.runner.parallel.streams import RankConnection, StreamGroup

    if way == "shared memory":
        return SharedMemoryGroup(memory, rank=rank, ranks=2).all_reduce
    if way == "TCP":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = RankConnection(connection, 1 - rank)
        return StreamGroup([None, stream] if rank == 0 else [stream, None]).all_reduce
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    from torch._C._distributed_c10d import FileStore

    store = FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    return torch.distributed.all_reduce


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
    options = parser(__doc__, plot=False)
    options.add_argument("--shape", choices=SHAPES, default="300M")
    options.add_argument("--columns", type=at_least_one, default=4096, help="of the tensors that are added")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 16, 64])
    options.add_argument("--prompts", type=at_least_one, default=8, help="prompts of 256 tokens")
    options.add_argument("--steps", type=at_least_one, default=32)
    options.add_argument("--runs", type=at_least_one, default=3)
    options.add_argument("--repeats", type=at_least_one, default=1000, help="sums of each size")
    arguments = options.parse_args()
    os.environ.update(compute_environment(1, os.environ))
    sums = [
        one for way in ("shared memory", "TCP", "gloo") for one in time_sums(way, arguments.columns, arguments.repeats)
    ]
    show_table(
        f"sums of bfloat16 by two ranks on {machine()}",
        ["over", "tensor", "median µs", "least µs"],
        [
            [one.way, f"[{one.rows}, {one.columns}]", f"{one.median_microseconds:.1f}", f"{one.least_microseconds:.1f}"]
            for one in sums
        ],
    )
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
    save(arguments.json, [*(asdict(one) for one in sums), *(asdict(row) for row in rows)])


if __name__ == "__main__":
    main()
