#!/usr/bin/env python3
"""Time to first token of one tenant, alone and behind another tenant's queue, by scheduling policy: no HTTP, no IPC.

Tenant a queues its prompts at once and is given some time; then tenant b sends one of its own. Its wait is compared
with that for an idle engine, in milliseconds and in service times of a prompt of a: a's throughput, measured meanwhile.
"""

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from time import perf_counter

from rich.console import Console
from rich.table import Table
from steps import DEMO_MODEL, Bench, usable_threads

from quire_engine.config import SchedulerOptions
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.ipc.process import compute_environment


@dataclass(frozen=True, kw_only=True)
class Result:
    name: str
    ttft_seconds: float
    """Of b: the median of its requests, each sent when the one before has ended and a has had several in between."""
    service_seconds: float | None
    """Of one prompt of a and its answer, at the throughput a had before b came."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--queued", type=int, default=500, help="prompts of tenant a (default 500)")
    parser.add_argument("--prompt", type=int, default=500, help="tokens of a prompt, of either tenant (default 500)")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer, of either (default 64)")
    parser.add_argument("--max-num-seqs", type=int, default=32, help="sequences that run at once (default 32)")
    parser.add_argument("--requests", type=int, default=5, help="of tenant b, of which the median is told (default 5)")
    parser.add_argument("--threads", type=int, default=usable_threads())
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser.parse_args()


class Tenants:
    def __init__(self, engine: Engine, arguments: argparse.Namespace, vocab_size: int) -> None:
        self.engine = engine
        self.arguments = arguments
        self.vocab_size = vocab_size
        self.chance = Random(1)
        self.keys = 0
        self.finished = 0

    def add(self, tenant: str) -> int:
        self.keys += 1
        prompt = [self.chance.randrange(self.vocab_size // 2) for _ in range(self.arguments.prompt)]
        params = SamplingParams(max_tokens=self.arguments.answer, temperature=0.0, ignore_eos=True)
        request = Request(key=self.keys, prompt_token_ids=prompt, params=params, seed=0, tenant=tenant)
        refusal = self.engine.add(request)
        if refusal is not None:
            raise SystemExit(refusal.message)
        return self.keys

    def step(self) -> list[int]:
        step = self.engine.step()
        assert step is not None
        self.finished += len(step.output.finished)
        return step.output.keys

    def run_until(self, finished: int) -> None:
        while self.engine.has_work and self.finished < finished:
            self.step()

    def time_to_first_token(self) -> float:
        began, key = perf_counter(), self.add("b")
        while key not in self.step():
            pass
        seconds = perf_counter() - began
        self.run_until(self.finished + self.arguments.max_num_seqs)
        return seconds


def measure(bench: Bench, name: str, scheduler: SchedulerOptions, arguments: argparse.Namespace, queued: int) -> Result:
    engine = make_engine(bench.model, scheduler=scheduler, cache=bench.config.cache)
    tenants = Tenants(engine, arguments, bench.model.vocab_size)
    for _ in range(queued):
        tenants.add("a")
    began, service = perf_counter(), None
    if queued:
        tenants.run_until(2 * arguments.max_num_seqs)
        service = (perf_counter() - began) / tenants.finished
    # One that waits for the whole queue is enough to know.
    rounds = arguments.requests if scheduler.policy == "fair" else 1
    waits = sorted(tenants.time_to_first_token() for _ in range(rounds))
    return Result(name=name, ttft_seconds=waits[len(waits) // 2], service_seconds=service)


def main() -> None:
    arguments = parse_arguments()
    os.environ.update(compute_environment(arguments.threads, {}))
    bench = Bench(arguments.model, threads=arguments.threads, dummy=arguments.load_format == "dummy")
    fair = replace(bench.config.scheduler, policy="fair", max_num_seqs=arguments.max_num_seqs)
    cases = [
        ("alone", fair, 0),
        ("fair", fair, arguments.queued),
        ("fcfs", replace(fair, policy="fcfs"), arguments.queued),
    ]
    table = Table(title="A tenant's time to first token", title_justify="left", show_edge=False)
    for column in ("behind", "TTFT", "more than alone", "a prompt's service", "in service times"):
        table.add_column(column, justify="left" if column == "behind" else "right")
    rows: list[Result] = []
    for name, scheduler, queued in cases:
        rows.append(measure(bench, name, scheduler, arguments, queued))
        result, more = rows[-1], rows[-1].ttft_seconds - rows[0].ttft_seconds
        service = result.service_seconds
        table.add_row(
            f"{queued} prompts, {name}" if queued else "nothing",
            f"{result.ttft_seconds * 1e3:,.0f} ms",
            f"{more * 1e3:,.0f} ms" if queued else "",
            f"{service * 1e3:,.0f} ms" if service else "",
            f"{more / service:,.2f}" if service else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    console.print(
        f"{arguments.model.name}, {bench.model.dtype}, prompts of {arguments.prompt} tokens, answers of"
        f" {arguments.answer}, {arguments.max_num_seqs} at once, {arguments.threads} threads of {usable_threads()}",
        style="dim",
        highlight=False,
    )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
