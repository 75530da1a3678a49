#!/usr/bin/env python3
"""Continuous against static batching, with our own engine and a real model, on answers of mixed lengths.

Continuous: all requests are handed over at once; whoever ends makes room for the next in the very next step. Static: as
many requests as fit go together, and the next ones start when the last of them has ended. Two kinds: *padded*, where
every row is computed until the longest is done, as a plain ``generate`` over a batch does, and *trimmed*, where rows
that have ended cost nothing. The switch is here alone; the engine has none. Runs are interleaved (A B C A B C), figures
are medians, and only the tokens asked for count. Tokens per CPU second tell the same on a machine with other work.
"""

import argparse
import os
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import report
from rich.progress import Progress

from quire_engine.config import (
    CacheOptions,
    EngineConfig,
    ModelOptions,
    ParallelOptions,
    SchedulerOptions,
    ServerOptions,
)
from quire_engine.core.ports import LoadedModel
from quire_engine.core.sampling_params import SamplingParams
from quire_engine.core.sequence import Request
from quire_engine.engine import Engine, make_engine
from quire_engine.errors import EngineError
from quire_engine.ipc.process import compute_environment
from quire_operator.bench.traces import read_trace

TRACE = Path(__file__).parent / "azure_llm_2023_code_slice.csv"
DEMO_MODEL = Path(__file__).resolve().parents[2] / "examples" / "models" / "quire-demo"


@dataclass(frozen=True, kw_only=True)
class Ask:
    prompt: list[int]
    num_tokens: int


def answer_lengths(kind: str, count: int, longest: int, chance: random.Random) -> list[int]:
    """``trace``: as in the production trace here, cut at the longest. ``exponential``: a mean of a quarter of it."""
    if kind == "trace":
        drawn = [row.output_tokens for row in chance.sample(read_trace(TRACE), count)]
    else:
        drawn = [4 + int(chance.expovariate(4 / longest)) for _ in range(count)]
    return [min(longest, length) for length in drawn]


def make_asks(lengths: Sequence[int], vocab_size: int, chance: random.Random) -> list[Ask]:
    """Prompts of 8 to 64 tokens."""
    return [
        Ask(prompt=[chance.randrange(vocab_size // 2) for _ in range(chance.randrange(8, 65))], num_tokens=length)
        for length in lengths
    ]


def submit(engine: Engine, asks: Sequence[Ask], lengths: Sequence[int]) -> None:
    for key, (ask, length) in enumerate(zip(asks, lengths, strict=True)):
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True)
        refusal = engine.add(Request(key=key, prompt_token_ids=ask.prompt, params=params, seed=key))
        assert refusal is None, refusal


def finish(engine: Engine) -> int:
    """Step until nothing is left; the steps."""
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    return steps


def continuous(engine: Engine, asks: Sequence[Ask], size: int) -> int:
    submit(engine, asks, [ask.num_tokens for ask in asks])
    return finish(engine)


def static(engine: Engine, asks: Sequence[Ask], size: int, *, padded: bool) -> int:
    steps = 0
    for first in range(0, len(asks), size):
        batch = asks[first : first + size]
        longest = max(ask.num_tokens for ask in batch)
        submit(engine, batch, [longest if padded else ask.num_tokens for ask in batch])
        steps += finish(engine)
    return steps


Way = Callable[[Engine, Sequence[Ask], int], int]
WAYS: dict[str, Way] = {
    "continuous": continuous,
    "static, trimmed": lambda engine, asks, size: static(engine, asks, size, padded=False),
    "static, padded": lambda engine, asks, size: static(engine, asks, size, padded=True),
}


def load(arguments: argparse.Namespace) -> tuple[EngineConfig, LoadedModel]:
    config = EngineConfig(
        model=ModelOptions(path=arguments.model, load_format=arguments.load_format, max_model_len=1024),
        # Prompts come again in each run: they must not be found.
        cache=CacheOptions(enable_prefix_caching=False, kv_cache_memory_bytes=arguments.kv_cache_mib * 2**20),
        scheduler=SchedulerOptions(max_num_seqs=arguments.batch_size, max_num_batched_tokens=1024),
        parallel=ParallelOptions(),
        server=ServerOptions(),
        threads=arguments.threads,
    )
    # As the engine's own process has it, and before torch is loaded.
    os.environ.update(compute_environment(arguments.threads, {}))
    from quire_engine.runner import load_model

    return config, load_model(config)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL, help="model folder (default: the demo model)")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--requests", type=int, default=160, help="at most 1,000 with --lengths trace")
    parser.add_argument("--lengths", choices=("trace", "exponential"), default="trace", help="of the answers")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256, help="longest answer in tokens (default 256)")
    parser.add_argument("--runs", type=int, default=3, help="of each way (default 3)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kv-cache-mib", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    try:
        config, model = load(arguments)
    except EngineError as error:
        raise SystemExit(str(error)) from None
    chance = random.Random(1)
    lengths = answer_lengths(arguments.lengths, arguments.requests, arguments.longest, chance)
    asks = make_asks(lengths, model.vocab_size, chance)
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    cpu_seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    steps: dict[str, int] = {}
    with Progress(transient=True) as progress:
        task = progress.add_task("runs", total=arguments.runs * len(WAYS))
        engine = make_engine(model, scheduler=config.scheduler, cache=config.cache)
        continuous(engine, asks[: arguments.batch_size], arguments.batch_size)  # warm-up
        for _ in range(arguments.runs):
            for name, way in WAYS.items():
                began, began_cpu = perf_counter(), process_time()
                steps[name] = way(engine, asks, arguments.batch_size)
                seconds[name].append(perf_counter() - began)
                cpu_seconds[name].append(process_time() - began_cpu)
                progress.advance(task)
    present(arguments, asks, seconds, cpu_seconds, steps)


def present(
    arguments: argparse.Namespace,
    asks: Sequence[Ask],
    seconds: dict[str, list[float]],
    cpu_seconds: dict[str, list[float]],
    steps: dict[str, int],
) -> None:
    tokens = sum(ask.num_tokens for ask in asks)
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    cpu_rates = {name: tokens / statistics.median(times) for name, times in cpu_seconds.items()}
    report.show(
        "Continuous against static batching",
        ["way", "steps", "tokens/s", "continuous is", "tokens per CPU second", "continuous is"],
        [
            [
                name,
                f"{steps[name]:,}",
                f"{rates[name]:,.0f}",
                f"{rates['continuous'] / rates[name]:.2f}×",
                f"{cpu_rates[name]:,.0f}",
                f"{cpu_rates['continuous'] / cpu_rates[name]:.2f}×",
            ]
            for name in WAYS
        ],
        notes=[
            f"{arguments.model.name}: {len(asks)} requests, {arguments.batch_size} at a time, answers of"
            f" {min(ask.num_tokens for ask in asks)} to {max(ask.num_tokens for ask in asks)} tokens, mean"
            f" {tokens / len(asks):.0f}; medians of {arguments.runs} interleaved runs, {arguments.threads} threads"
        ],
    )
    report.save(
        arguments.json,
        [{"way": name, "tokens_per_second": rates[name], "tokens_per_cpu_second": cpu_rates[name]} for name in WAYS],
    )


if __name__ == "__main__":
    main()
