#!/usr/bin/env python3
"""What preemption costs when the KV cache holds a part of what the requests want, by recompute, by swap and by auto.

All requests of a mix are handed over at once. What they want is the cache memory that holds every one of them to its
end; the cache has a share of it (a quarter unless told otherwise), so sequences lose their blocks as others grow. Every
request has to complete, with as many tokens as it asked for; that is checked.

  recompute   blocks are given up, and computed again later; no swap space
  swap        blocks are copied to swap space in host memory, and back later
  auto        whichever the engine's measured rates say is cheaper, sequence by sequence
  no swap     recompute, and the memory of the swap space given to the KV cache instead

Swap space is memory too: on a CPU it is the same memory as the cache's, so the last way is the one to compare with; on
a GPU it would not be. Runs take turns (A B C D A B C D) and figures are medians; CPU time tells the same on a machine
with other work. Seconds of swapping are measured; those of recomputing are the tokens at the prefill rate of warm-up.
"""

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import report
from engines import Bench, add_model_options, ask, load, random_tokens
from report import at_least_one

from quire_engine.config import CacheOptions, SchedulerOptions
from quire_engine.core.kv_layout import KVCacheLayout
from quire_engine.core.preemption import PreemptionMode

BLOCK_SIZE = 16
HEADROOM_BLOCKS = 1


@dataclass(frozen=True, kw_only=True)
class Mix:
    name: str
    prompts: tuple[int, int]
    answers: tuple[int, int]


MIXES = (
    Mix(name="short", prompts=(32, 96), answers=(96, 160)),
    Mix(name="long", prompts=(300, 500), answers=(200, 300)),
)


@dataclass(frozen=True, kw_only=True)
class Way:
    name: str
    mode: PreemptionMode
    has_swap_space: bool
    swap_space_is_cache: bool = False


WAYS = (
    Way(name="recompute", mode="recompute", has_swap_space=False),
    Way(name="swap", mode="swap", has_swap_space=True),
    Way(name="auto", mode="auto", has_swap_space=True),
    Way(name="no swap", mode="recompute", has_swap_space=False, swap_space_is_cache=True),
)


@dataclass(frozen=True, kw_only=True)
class Ask:
    prompt: list[int]
    num_tokens: int

    @property
    def blocks(self) -> int:
        """At its end; the last token drawn needs no slot."""
        return -(-(len(self.prompt) + self.num_tokens - 1) // BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True)
class Run:
    seconds: float
    cpu_seconds: float
    steps: int
    completed: int
    preemptions: Counter[str]
    recomputed_tokens: int
    swapped_out_blocks: int
    swapped_in_blocks: int
    swap_seconds: float


def make_asks(mix: Mix, count: int, vocab_size: int, chance: random.Random) -> list[Ask]:
    return [
        Ask(
            prompt=random_tokens(chance, chance.randint(*mix.prompts), vocab_size),
            num_tokens=chance.randint(*mix.answers),
        )
        for _ in range(count)
    ]


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Blocks of every KV cache group."""

    wanted: int
    cache: int
    swap: int

    def layout(self, allocated: KVCacheLayout, way: Way) -> KVCacheLayout:
        num_blocks = self.cache + (self.swap if way.swap_space_is_cache else 0)
        groups = tuple(
            replace(group, num_blocks=num_blocks, num_swap_blocks=self.swap if way.has_swap_space else 0)
            for group in allocated.groups
        )
        return replace(allocated, groups=groups)


def size_memory(asks: Sequence[Ask], arguments: argparse.Namespace) -> Memory:
    """As far as one sequence at its longest still fits."""
    wanted = sum(ask.blocks for ask in asks)
    least = max(ask.blocks for ask in asks) + HEADROOM_BLOCKS
    return Memory(
        wanted=wanted,
        cache=max(least, round(wanted * arguments.memory)),
        swap=max(1, round(wanted * arguments.swap_space)),
    )


def run(bench: Bench, way: Way, asks: Sequence[Ask], memory: Memory) -> Run:
    engine = bench.engine(layout=memory.layout(bench.model.layout, way), preemption_mode=way.mode)
    began, began_cpu = perf_counter(), process_time()
    for key, wanted in enumerate(asks):
        ask(engine, key, wanted.prompt, wanted.num_tokens)
    tokens: Counter[int] = Counter()
    ended: set[int] = set()
    while engine.has_work:
        step = engine.step()
        if step is not None:
            tokens.update(step.output.keys)
            ended.update(finished.key for finished in step.output.finished)
    seconds, cpu_seconds = perf_counter() - began, process_time() - began_cpu
    engine.check_integrity()
    counters = engine.counters
    return Run(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        steps=counters.steps,
        completed=sum(key in ended and tokens[key] == wanted.num_tokens for key, wanted in enumerate(asks)),
        preemptions=Counter(counters.preemptions),
        recomputed_tokens=counters.recomputed_tokens,
        swapped_out_blocks=counters.swapped_out_blocks,
        swapped_in_blocks=counters.swapped_in_blocks,
        swap_seconds=engine.seconds.swap,
    )


def share(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number <= 1.0:
        raise argparse.ArgumentTypeError(f"{text!r} should be above 0 and at most 1")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--requests", type=at_least_one, default=24, help="of each mix, all at once (default 24)")
    parser.add_argument("--mixes", nargs="+", choices=[mix.name for mix in MIXES], default=[mix.name for mix in MIXES])
    parser.add_argument("--memory", type=share, default=0.25, help="of what the requests want (default 0.25)")
    parser.add_argument("--swap-space", type=share, default=0.25, help="of the same, besides (default 0.25)")
    parser.add_argument("--runs", type=at_least_one, default=3, help="of each way, by turns (default 3)")
    add_model_options(parser)
    parser.add_argument(
        "--kv-cache-mib", type=at_least_one, default=256, help="allocated; a part is used (default 256)"
    )
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    mixes = [mix for mix in MIXES if mix.name in arguments.mixes]
    num_bytes = arguments.kv_cache_mib * 2**20
    bench = load(
        arguments,
        cache=CacheOptions(block_size=BLOCK_SIZE, kv_cache_memory_bytes=num_bytes, swap_space_bytes=num_bytes),
        scheduler=SchedulerOptions(
            max_num_seqs=arguments.requests, max_num_batched_tokens=max(2048, arguments.requests)
        ),
        max_model_len=max(mix.prompts[1] + mix.answers[1] for mix in mixes),
    )
    chance = random.Random(1)
    asks = {mix.name: make_asks(mix, arguments.requests, bench.model.vocab_size, chance) for mix in mixes}
    memory = {name: size_memory(of_mix, arguments) for name, of_mix in asks.items()}
    check_allocated(bench, memory.values(), num_bytes)
    runs: dict[tuple[str, str], list[Run]] = {(mix.name, way.name): [] for mix in mixes for way in WAYS}
    with report.progress() as progress:
        task = progress.add_task("runs", total=arguments.runs * len(runs) + 1)
        run(bench, WAYS[0], next(iter(asks.values()))[:4], next(iter(memory.values())))  # warm-up
        progress.advance(task)
        for _ in range(arguments.runs):
            for mix in mixes:
                for way in WAYS:
                    runs[mix.name, way.name].append(run(bench, way, asks[mix.name], memory[mix.name]))
                    progress.advance(task)
    rows = [summarize(bench, mix, way, memory[mix], measured) for (mix, way), measured in runs.items()]
    present(arguments, bench, rows)
    incomplete = [f"{row['mix']}, {row['way']}" for row in rows if row["completed"] < arguments.requests]
    if incomplete:
        raise SystemExit(f"not every request completed: {'; '.join(incomplete)}")


def check_allocated(bench: Bench, memories: Iterable[Memory], num_bytes: int) -> None:
    needed = max(memory.cache + memory.swap for memory in memories)
    allocated = min(min(group.num_blocks, group.num_swap_blocks) for group in bench.model.layout.groups)
    if needed > allocated:
        mib = -(-num_bytes * needed // allocated // 2**20) + 1
        raise SystemExit(f"{needed} blocks are needed and {allocated} fit: use --kv-cache-mib {mib}, or fewer requests")


Row = dict[str, Any]


def summarize(bench: Bench, mix: str, way: str, memory: Memory, runs: Sequence[Run]) -> Row:
    def median(attribute: str) -> float:
        return float(statistics.median(getattr(run, attribute) for run in runs))

    labels = sorted({label for run in runs for label in run.preemptions})
    rate = bench.model.prefill_tokens_per_second
    recomputed = median("recomputed_tokens")
    return {
        "mix": mix,
        "way": way,
        "cache_blocks": memory.cache + (memory.swap if way == "no swap" else 0),
        "swap_blocks": memory.swap if way in ("swap", "auto") else 0,
        "wanted_blocks": memory.wanted,
        "completed": min(run.completed for run in runs),
        "seconds": median("seconds"),
        "cpu_seconds": median("cpu_seconds"),
        "steps": median("steps"),
        "preemptions": {label: statistics.median(run.preemptions[label] for run in runs) for label in labels},
        "recomputed_tokens": recomputed,
        "recompute_seconds": recomputed / rate if rate else None,
        "swapped_out_blocks": median("swapped_out_blocks"),
        "swapped_in_blocks": median("swapped_in_blocks"),
        "swap_seconds": median("swap_seconds"),
    }


def present(arguments: argparse.Namespace, bench: Bench, rows: Sequence[Row]) -> None:
    report.show(
        f"Preemption with {arguments.memory:.0%} of the KV cache memory that the requests want",
        ["mix, way", "done", "seconds", "CPU s", "steps", "preempted", "recomputed", "≈ s", "blocks out, in", "swap s"],
        [
            [
                f"{row['mix']}, {row['way']}",
                f"{row['completed']}/{arguments.requests}",
                f"{row['seconds']:.2f}",
                f"{row['cpu_seconds']:.2f}",
                f"{row['steps']:,.0f}",
                "\n".join(f"{count:.0f} {label}" for label, count in row["preemptions"].items()) or "0",
                f"{row['recomputed_tokens']:,.0f}",
                "–" if row["recompute_seconds"] is None else f"{row['recompute_seconds']:.2f}",
                f"{row['swapped_out_blocks']:,.0f}, {row['swapped_in_blocks']:,.0f}",
                f"{row['swap_seconds']:.3f}",
            ]
            for row in rows
        ],
        notes=[f"{bench}; medians of {arguments.runs} runs by turns", rates(bench), *map(verdict, by_mix(rows))],
    )
    report.save(arguments.json, rows)
    if arguments.plot:
        draw(arguments.plot, f"{arguments.memory:.0%} of the memory wanted, {bench}", by_mix(rows))


def rates(bench: Bench) -> str:
    model = bench.model
    prefill, swap = model.prefill_tokens_per_second, model.swap_bytes_per_second
    if prefill is None or swap is None:
        return "the cost model's rates: not measured"
    again, copied = BLOCK_SIZE / prefill, 2 * sum(model.block_bytes) / swap
    return (
        f"the cost model begins with {prefill:,.0f} prompt tokens/s and {swap / 1e9:.1f} GB/s: a block of {BLOCK_SIZE}"
        f" tokens takes {again * 1e6:,.0f} µs to compute again, and {copied * 1e6:,.0f} µs to swap out and in"
    )


def by_mix(rows: Sequence[Row]) -> list[list[Row]]:
    mixes = dict.fromkeys(row["mix"] for row in rows)
    return [[row for row in rows if row["mix"] == mix] for mix in mixes]


def verdict(rows: Sequence[Row]) -> str:
    recompute, *others = rows
    fastest = min(rows[:3], key=lambda row: float(row["cpu_seconds"]))
    swap, auto, instead = (f"{row['cpu_seconds'] / recompute['cpu_seconds']:.2f}" for row in others)
    return (
        f"{recompute['mix']}: {fastest['way']} took the least CPU time; of recompute's, swap took {swap}, auto {auto},"
        f" and recompute with the swap space's memory in the cache {instead}"
    )


def draw(path: Path, title: str, mixes: Sequence[Sequence[Row]]) -> None:
    """A panel a mix: the time of each way, and what of it is recomputing and swapping."""
    figure = report.new_figure(f"Preemption with {title}")
    for axes, rows in zip(figure.subplots(1, len(mixes), squeeze=False)[0], mixes, strict=True):
        names = [row["way"] for row in rows]
        recompute = [row["recompute_seconds"] or 0.0 for row in rows]
        swap = [row["swap_seconds"] for row in rows]
        rest = [max(0.0, row["seconds"] - a - b) for row, a, b in zip(rows, recompute, swap, strict=True)]
        axes.bar(names, rest, label="everything else", color="tab:gray")
        axes.bar(names, recompute, bottom=rest, label="recomputing (tokens at the prefill rate)", color="tab:orange")
        below = [a + b for a, b in zip(rest, recompute, strict=True)]
        axes.bar(names, swap, bottom=below, label="swapping (measured)", color="tab:blue")
        for place, row in enumerate(rows):
            count = sum(row["preemptions"].values())
            axes.annotate(f"{count:.0f} preempted", (place, row["seconds"]), ha="center", va="bottom")
        axes.set(title=f"{rows[0]['mix']} contexts", ylabel="seconds until all are done, median")
        axes.set_ylim(0, max(row["seconds"] for row in rows) * 1.35)
        axes.legend(loc="upper center", fontsize="small")
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
