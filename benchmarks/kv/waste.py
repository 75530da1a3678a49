#!/usr/bin/env python3
"""How much of the KV cache memory that is taken holds nothing, on a production trace.

The scheduler runs the requests of the trace, lengths as they are, under a simulated clock: a step takes a fixed time
and a time a token. What is drawn does not matter here (lengths come from the trace), so the runner draws one token for
all. Waste is allocated token slots that hold no token, as a share of the allocated ones, weighted by time.

Beside it, what the same sequences would take at the same moments in systems that reserve one stretch of memory a
sequence: for the model's longest sequence, for the next power of two of its final length, and for its final length
exactly, which nobody knows beforehand.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import report
from report import at_least_one
from rich.progress import Progress

from quire_cli.bench.traces import TraceError, TraceRow, read_trace
from quire_engine.core.batch import RunnerOutput
from quire_engine.core.kv_layout import KVCacheGroup, KVCacheLayout
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.scheduler import Scheduler, SchedulerConfig
from quire_engine.core.sequence import Request

GOAL = 0.01
DEFAULT_TRACE = Path(__file__).parent / "azure_llm_2023_code_slice.csv"
DRAWN = 7
RESERVATIONS = ("the longest sequence", "next power of two", "final length, foreseen")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A simulated device."""

    blocks_tokens: int
    step_seconds: float
    token_seconds: float
    max_num_seqs: int
    budget: int
    max_model_len: int


@dataclass
class Slots:
    """Slot-seconds."""

    allocated: float = 0.0
    wasted: float = 0.0
    worst: float = 0.0

    def add(self, allocated: int, held: int, seconds: float) -> None:
        self.allocated += allocated * seconds
        self.wasted += (allocated - held) * seconds
        if allocated:
            self.worst = max(self.worst, (allocated - held) / allocated)

    @property
    def share(self) -> float:
        return self.wasted / self.allocated if self.allocated else 0.0


@dataclass
class Result:
    paged: Slots = field(default_factory=Slots)
    reserved: dict[str, Slots] = field(default_factory=lambda: {name: Slots() for name in RESERVATIONS})
    over_time: dict[int, Slots] = field(default_factory=dict)
    """Paged, by the minute."""
    steps: int = 0
    preemptions: int = 0
    most_running: int = 0
    simulated_seconds: float = 0.0


def reserved_slots(final: int, longest: int) -> tuple[int, int, int]:
    """As RESERVATIONS names them."""
    return longest, min(longest, 1 << (final - 1).bit_length()), final


def simulate(rows: Sequence[TraceRow], machine: Machine, block_size: int, progress: Progress) -> Result:
    num_blocks = machine.blocks_tokens // block_size
    layout = KVCacheLayout(block_size=block_size, groups=(KVCacheGroup(layers=(0,), num_blocks=num_blocks),))
    config = SchedulerConfig(
        max_num_seqs=machine.max_num_seqs,
        max_num_batched_tokens=machine.budget,
        max_model_len=machine.max_model_len,
    )
    scheduler = Scheduler(config, layout)
    result = Result()
    final = {key: row.input_tokens + row.output_tokens for key, row in enumerate(rows)}
    held: dict[int, int] = {}  # running sequences: tokens in the cache
    row_keys: dict[int, int] = {}
    task = progress.add_task(f"block size {block_size}", total=len(rows))
    now, arrived = 0.0, 0
    while arrived < len(rows) or scheduler.has_unfinished:
        if not scheduler.has_unfinished:
            now = max(now, rows[arrived].arrival_seconds)
        while arrived < len(rows) and rows[arrived].arrival_seconds <= now:
            submit(scheduler, arrived, rows[arrived])
            arrived += 1
        batch = scheduler.schedule()
        assert batch is not None
        for row in batch.released_rows:
            held.pop(row_keys.pop(row))
        for admission in batch.admitted:
            row_keys[admission.row] = admission.seed
        for row, computed, count in zip(batch.rows, batch.num_computed, batch.num_scheduled, strict=True):
            held[row_keys[row]] = computed + count
        seconds = machine.step_seconds + machine.token_seconds * batch.num_tokens
        observe(result, scheduler, held, final, machine, block_size, now, seconds)
        output = scheduler.commit(batch, RunnerOutput(token_ids=[DRAWN] * sum(batch.samples)))
        progress.advance(task, len(output.finished))
        now += seconds
    result.simulated_seconds = now
    result.steps = scheduler.counters.steps
    result.preemptions = sum(scheduler.counters.preemptions.values())
    return result


def submit(scheduler: Scheduler, key: int, row: TraceRow) -> None:
    refusal = scheduler.add(
        Request(
            key=key,
            prompt_token_ids=[key] * row.input_tokens,
            params=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
            seed=key,
        )
    )
    if refusal is not None:
        raise SystemExit(f"request {key} of the trace does not fit: {refusal.message}")


def observe(
    result: Result,
    scheduler: Scheduler,
    held: dict[int, int],
    final: dict[int, int],
    machine: Machine,
    block_size: int,
    now: float,
    seconds: float,
) -> None:
    gauges = scheduler.gauges()
    allocated, wasted = gauges.blocks_used * block_size, gauges.kv_slots_wasted
    tokens = sum(held.values())
    assert allocated - wasted == tokens, "the scheduler's gauge and the count of tokens differ"
    result.paged.add(allocated, tokens, seconds)
    result.over_time.setdefault(int(now // 60), Slots()).add(allocated, tokens, seconds)
    result.most_running = max(result.most_running, gauges.num_running)
    reserved = [reserved_slots(final[key], machine.max_model_len) for key in held]
    for number, name in enumerate(RESERVATIONS):
        result.reserved[name].add(sum(entry[number] for entry in reserved), tokens, seconds)


def positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", type=Path, default=DEFAULT_TRACE, help="CSV or JSON lines (default: the slice here)")
    parser.add_argument("--requests", type=at_least_one, help="only the first so many")
    parser.add_argument("--speed", type=positive, default=1.0, help="how much faster requests arrive (default 1)")
    parser.add_argument("--block-sizes", type=at_least_one, nargs="+", default=[16, 32, 64], metavar="TOKENS")
    parser.add_argument(
        "--cache-tokens", type=at_least_one, default=400_000, help="size of the KV cache (default 400,000)"
    )
    parser.add_argument("--max-num-seqs", type=at_least_one, default=256)
    parser.add_argument("--max-num-batched-tokens", type=at_least_one, default=2048)
    parser.add_argument("--max-model-len", type=at_least_one, default=8192)
    parser.add_argument("--step-ms", type=positive, default=12.0, help="of a step, whatever its tokens (default 12)")
    parser.add_argument("--token-us", type=positive, default=50.0, help="of each token of a step (default 50)")
    arguments = parser.parse_args()
    if arguments.max_num_seqs > arguments.max_num_batched_tokens:
        parser.error("--max-num-batched-tokens has to be at least --max-num-seqs: a token for each in every step")
    if arguments.cache_tokens < max(arguments.block_sizes):
        parser.error(f"--cache-tokens {arguments.cache_tokens} is less than a block of {max(arguments.block_sizes)}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    try:
        rows = read_trace(arguments.trace)[: arguments.requests]
    except (OSError, TraceError) as error:
        raise SystemExit(f"cannot read the trace: {error}") from None
    rows = [
        TraceRow(
            arrival_seconds=row.arrival_seconds / arguments.speed,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
        )
        for row in rows
    ]
    machine = Machine(
        blocks_tokens=arguments.cache_tokens,
        step_seconds=arguments.step_ms / 1e3,
        token_seconds=arguments.token_us / 1e6,
        max_num_seqs=arguments.max_num_seqs,
        budget=arguments.max_num_batched_tokens,
        max_model_len=arguments.max_model_len,
    )
    began = time.perf_counter()
    with report.progress() as progress:
        results = {size: simulate(rows, machine, size, progress) for size in arguments.block_sizes}
    present(arguments, rows, results, time.perf_counter() - began)
    if arguments.plot:
        draw(arguments.plot, arguments.trace.name, results)


def by_allocation(results: dict[int, Result]) -> list[tuple[str, Slots]]:
    first = next(iter(results.values()))
    paged = [(f"paged, blocks of {size}", result.paged) for size, result in results.items()]
    return paged + [(f"reserved: {name}", slots) for name, slots in first.reserved.items()]


def present(
    arguments: argparse.Namespace, rows: Sequence[TraceRow], results: dict[int, Result], seconds: float
) -> None:
    first = next(iter(results.values()))
    named = by_allocation(results)
    paged = first.paged.allocated
    table = [
        [name, f"{slots.share:.2%}", f"{slots.worst:.1%}", f"{slots.allocated / paged:.2f}×"] for name, slots in named
    ]
    prompt = sum(row.input_tokens for row in rows) / len(rows)
    answer = sum(row.output_tokens for row in rows) / len(rows)
    report.show(
        "KV cache memory that holds nothing",
        ["allocation", "waste", "worst moment", "memory taken"],
        table,
        notes=[
            f"{len(rows):,} requests, mean prompt {prompt:,.0f} and answer {answer:,.0f} tokens, arriving"
            f" {arguments.speed:g}× as fast as in {arguments.trace.name}",
            f"{first.steps:,} steps over {first.simulated_seconds:,.0f} simulated seconds, at most"
            f" {first.most_running} at once, {first.preemptions} preemptions; took {seconds:.0f} s",
        ],
    )
    report.save(
        arguments.json,
        [
            {"allocation": name, "waste": slots.share, "worst": slots.worst, "memory": slots.allocated / paged}
            for name, slots in named
        ],
    )


def draw(path: Path, trace: str, results: dict[int, Result]) -> None:
    """Left: paging by the minute. Right: beside reservation, which needs another scale."""
    figure = report.new_figure(f"KV cache memory that holds nothing, {trace}")
    time_axes, kind_axes = figure.subplots(1, 2, width_ratios=(3, 2))
    for size, result in results.items():
        minutes = sorted(result.over_time)
        time_axes.plot(
            [minute + 0.5 for minute in minutes],
            [result.over_time[minute].share * 100 for minute in minutes],
            label=f"blocks of {size} tokens",
        )
    time_axes.axhline(GOAL * 100, color="black", linestyle="--", linewidth=1, label="goal, over all")
    time_axes.set(xlabel="minutes of the trace", ylabel="% of the allocated slots, by the minute")
    time_axes.set_ylim(0, time_axes.get_ylim()[1] * 1.25)  # room for the legend
    time_axes.legend(loc="upper center", ncols=2)
    named = by_allocation(results)[::-1]
    bars = kind_axes.barh([name for name, _ in named], [slots.share * 100 for _, slots in named])
    kind_axes.bar_label(bars, fmt="%.2g %%", padding=3)
    kind_axes.set(xlabel="% of the allocated slots", xlim=(0, 100))
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
