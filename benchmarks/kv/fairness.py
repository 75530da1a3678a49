#!/usr/bin/env python3
"""How long one tenant waits behind another's queue, under each scheduling policy.

A heavy tenant has queued hundreds of prompts when a light one sends one prompt, and after its answer the next one. What
counts is the light tenant's time to first token (TTFT): alone, and behind the heavy one under fcfs, priority (the light
tenant's requests carry the smaller number) and fair (nobody has to say anything). The goal under fair: at most one
prompt's service time more than alone, that is one heavy request's, prompt and answer, with nobody else there.

No model runs and the clock is simulated: a step takes a fixed time and a time a token, so the figures are exact and
the same on every machine. benchmarks/serving/fair_sharing.py measures fcfs and fair with a real model.
"""

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import report
from engines import (
    SimulatedClock,
    StepTime,
    ask,
    engine_without_model,
    finish,
    random_tokens,
)
from report import at_least_one

from quire_engine.core.policy import PolicyName
from quire_engine.core.scheduler import SchedulerConfig
from quire_engine.engine import Engine

POLICIES: tuple[PolicyName, ...] = ("fcfs", "priority", "fair")
BLOCK_SIZE = 16
VOCAB_SIZE = 1000
MAX_BATCHED_TOKENS = 2048
SETTLED_STEPS = 20
"""That the heavy tenant has to itself before the light one comes."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Timed:
    """An engine and its clock."""

    engine: Engine
    now: Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Tenant:
    name: str
    requests: int
    prompt: int
    answer: int
    priority: int

    def ask(self, engine: Engine, key: int, chance: random.Random) -> None:
        prompt = random_tokens(chance, self.prompt, VOCAB_SIZE)
        ask(engine, key, prompt, self.answer, tenant=self.name, priority=self.priority)


@dataclass(frozen=True, kw_only=True)
class World:
    """``make`` gives an engine with an empty cache and nothing to do."""

    make: Callable[[PolicyName], Timed]
    heavy: Tenant
    light: Tenant
    name: str


@dataclass(frozen=True, kw_only=True)
class Service:
    """Of one heavy request, with nobody else there."""

    first_token_seconds: float
    whole_seconds: float


def serve_one(world: World) -> Service:
    timed = world.make("fcfs")
    began = timed.now()
    world.heavy.ask(timed.engine, 0, random.Random(0))
    first = first_token_time(timed.engine, 0)
    return Service(first_token_seconds=first - began, whole_seconds=timed.now() - began)


def light_ttfts(world: World, policy: PolicyName, *, alone: bool) -> list[float]:
    """Of each of the light tenant's requests, sent when the one before has ended and while the heavy one's wait."""
    timed, chance = world.make(policy), random.Random(1)
    engine, heavy = timed.engine, 0 if alone else world.heavy.requests
    for key in range(heavy):
        world.heavy.ask(engine, key, chance)
    for _ in range(SETTLED_STEPS if heavy else 0):
        engine.step()
    seconds: list[float] = []
    while len(seconds) < world.light.requests and (alone or engine.gauges().num_waiting):
        key, sent = heavy + len(seconds), timed.now()
        world.light.ask(engine, key, chance)
        seconds.append(first_token_time(engine, key) - sent)
    for key in range(heavy):
        engine.cancel(key)
    finish(engine)
    return seconds


def first_token_time(engine: Engine, key: int) -> float:
    """Steps until the request has ended."""
    first = None
    while True:
        step = engine.step()
        if step is None:
            continue
        if first is None and key in step.output.keys:
            first = step.ended
        if any(finished.key == key for finished in step.output.finished):
            assert first is not None
            return first


def parse_arguments() -> argparse.Namespace:
    parser = report.parser(__doc__)
    parser.add_argument("--queued", type=at_least_one, default=500, help="prompts of the heavy tenant (default 500)")
    parser.add_argument("--heavy-prompt", type=at_least_one, default=400, help="tokens of each (default 400)")
    parser.add_argument("--heavy-answer", type=at_least_one, default=64)
    parser.add_argument("--light-requests", type=at_least_one, default=10, help="one after the other (default 10)")
    parser.add_argument("--light-prompt", type=at_least_one, default=100)
    parser.add_argument("--light-answer", type=at_least_one, default=16)
    parser.add_argument("--max-num-seqs", type=at_least_one, default=16, help="that run at once (default 16)")
    parser.add_argument("--step-ms", type=float, default=12.0, help="of a simulated step (default 12)")
    parser.add_argument("--token-us", type=float, default=400.0, help="of each token of it (default 400)")
    arguments = parser.parse_args()
    if arguments.step_ms <= 0 or arguments.token_us <= 0:
        parser.error("--step-ms and --token-us should be above 0")
    if arguments.max_num_seqs > MAX_BATCHED_TOKENS:
        parser.error(f"--max-num-seqs should be at most {MAX_BATCHED_TOKENS}")
    if arguments.queued <= arguments.max_num_seqs:
        parser.error(f"--queued should be above --max-num-seqs {arguments.max_num_seqs}: otherwise nothing waits")
    return arguments


def make_world(arguments: argparse.Namespace) -> World:
    heavy = Tenant(
        name="heavy",
        requests=arguments.queued,
        prompt=arguments.heavy_prompt,
        answer=arguments.heavy_answer,
        priority=1,
    )
    light = Tenant(
        name="light",
        requests=arguments.light_requests,
        prompt=arguments.light_prompt,
        answer=arguments.light_answer,
        priority=0,
    )
    longest = max(heavy.prompt + heavy.answer, light.prompt + light.answer)
    # Room for all that run: this is about the queue.
    blocks = (arguments.max_num_seqs + 2) * (-(-longest // BLOCK_SIZE) + 1)

    def make(policy: PolicyName) -> Timed:
        clock = SimulatedClock()
        engine = engine_without_model(
            SchedulerConfig(
                max_num_seqs=arguments.max_num_seqs,
                max_num_batched_tokens=MAX_BATCHED_TOKENS,
                max_model_len=longest,
                policy=policy,
            ),
            num_blocks=blocks,
            block_size=BLOCK_SIZE,
            time=StepTime(step_seconds=arguments.step_ms / 1e3, token_seconds=arguments.token_us / 1e6),
            clock=clock,
        )
        return Timed(engine=engine, now=clock)

    name = f"simulated: a step {arguments.step_ms:g} ms and {arguments.token_us:g} µs a token"
    return World(make=make, heavy=heavy, light=light, name=name)


def main() -> None:
    arguments = parse_arguments()
    world = make_world(arguments)
    measured: dict[str, list[float]] = {}
    with report.progress() as progress:
        task = progress.add_task("policies", total=2 + len(POLICIES))
        service = serve_one(world)
        progress.advance(task)
        measured["alone"] = light_ttfts(world, "fcfs", alone=True)
        progress.advance(task)
        for policy in POLICIES:
            measured[policy] = light_ttfts(world, policy, alone=False)
            if not measured[policy]:
                raise SystemExit("the heavy tenant's queue was gone before the light one came: use a larger --queued")
            progress.advance(task)
    alone = statistics.median(measured["alone"])
    rows: list[Row] = [
        {
            "policy": name,
            "requests": len(seconds),
            "median_ttft_seconds": statistics.median(seconds),
            "worst_ttft_seconds": max(seconds),
            "added_seconds": max(seconds) - alone,
            "added_services": (max(seconds) - alone) / service.whole_seconds,
        }
        for name, seconds in measured.items()
    ]
    present(arguments, world, service, rows)


def present(arguments: argparse.Namespace, world: World, service: Service, rows: Sequence[Row]) -> None:
    heavy, light = world.heavy, world.light
    report.show(
        f"A light tenant's time to first token behind {heavy.requests} prompts of another",
        ["policy", "requests", "median TTFT", "worst TTFT", "worst over alone", "in service times"],
        [
            [
                row["policy"],
                f"{row['requests']}",
                f"{row['median_ttft_seconds'] * 1e3:,.0f} ms",
                f"{row['worst_ttft_seconds'] * 1e3:,.0f} ms",
                f"{row['added_seconds'] * 1e3:+,.0f} ms",
                f"{row['added_services']:.2f}",
            ]
            for row in rows
        ],
        notes=[
            f"{world.name}; {arguments.max_num_seqs} run at once; heavy: {heavy.prompt} + {heavy.answer} tokens,"
            f" light: {light.prompt} + {light.answer}",
            f"one heavy prompt's service time, alone: {service.whole_seconds * 1e3:,.0f} ms with its answer,"
            f" {service.first_token_seconds * 1e3:,.0f} ms to its first token; the goal under fair: at most one added",
            "requests: those sent while the heavy tenant's queue lasted",
        ],
    )
    own = {"service_seconds": service.whole_seconds, "service_ttft_seconds": service.first_token_seconds}
    report.save(arguments.json, [{**row, **own} for row in rows])
    if arguments.plot:
        draw(arguments.plot, world, service, rows)


def draw(path: Path, world: World, service: Service, rows: Sequence[Row]) -> None:
    title = f"A light tenant behind {world.heavy.requests} queued prompts\n{world.name}"
    figure = report.new_figure(title, width=8)
    axes = figure.subplots()
    bars = axes.bar([row["policy"] for row in rows], [row["worst_ttft_seconds"] for row in rows])
    axes.bar_label(bars, fmt="%.3g s", padding=3)
    goal = rows[0]["median_ttft_seconds"] + service.whole_seconds
    axes.axhline(goal, color="black", linestyle="--", linewidth=1, label="goal: alone + one heavy prompt's service")
    axes.set(yscale="log", ylabel="worst time to first token (s)")
    axes.set_ylim(rows[0]["median_ttft_seconds"] / 3, max(row["worst_ttft_seconds"] for row in rows) * 10)
    axes.legend(loc="upper right")
    report.save_figure(path, figure)


if __name__ == "__main__":
    main()
