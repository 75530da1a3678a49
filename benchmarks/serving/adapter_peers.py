#!/usr/bin/env python3
"""Compare the cost of low-rank adapters (LoRA) in quire and in vLLM: the same adapters, model, and requests.

    python -m benchmarks.serving.adapter_peers [--adapters 8] [--rank 8] [--sequences 16] [--runs 3]

Each server has slots for all adapters. Its clients get greedy answers of the same length, once all from the base model
and once each from one of the adapters. Servers run one at a time and in turns. The ratio is that of a server's own
rates with adapters and of its base. vLLM is installed by ``make peers``.
"""

import asyncio
import statistics
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import aiohttp

from benchmarks.models.random_adapter import write_random_adapters
from benchmarks.report import DEMO_MODEL, at_least_one, interrupt_on_terminate, machine, parser, save, show_table
from benchmarks.serving.comparison.started import PEERS, start_each


@dataclass(frozen=True, kw_only=True)
class Result:
    """The medians of one server."""

    server: str
    base_tokens_per_second: float
    adapters_tokens_per_second: float
    ratio: float


async def tokens_per_second(url: str, names: list[str], sequences: int, answer: int, rounds: int) -> float:
    """Return the rate at which so many clients, each with a name of its own, get ``rounds`` answers one by one."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client(number: int) -> int:
            tokens = 0
            for turn in range(rounds):
                body = {
                    "model": names[number % len(names)],
                    "prompt": f"Explain record {number} of {turn}.",
                    "max_tokens": answer,
                    "temperature": 0.0,
                    "ignore_eos": True,
                }
                async with session.post(f"{url}/v1/completions", json=body) as response:
                    found = await response.json()
                    response.raise_for_status()
                tokens += found["usage"]["completion_tokens"]
            return tokens

        began = perf_counter()
        counts = await asyncio.gather(*(client(number) for number in range(sequences)))
        return sum(counts) / (perf_counter() - began)


async def await_names(url: str, names: list[str]) -> None:
    """Wait until a server lists all adapters: quire loads them after it is ready."""
    async with aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/v1/models") as response:
                listed = {model["id"] for model in (await response.json())["data"]}
            if listed.issuperset(names):
                return
            await asyncio.sleep(0.1)


def compare(arguments: Namespace) -> Iterator[Result]:
    """Yield the figures of each server that starts."""
    with TemporaryDirectory(prefix="quire-adapters-") as folder, ExitStack() as stack:
        folders = write_random_adapters(Path(folder), arguments.model, count=arguments.adapters, rank=arguments.rank)
        names = [f"adapter-{number}" for number in range(len(folders))]
        flags = ["--enable-lora", "--max-loras", str(len(names)), "--max-lora-rank", str(arguments.rank)]
        flags += ["--lora-modules", *(f"{name}={path}" for name, path in zip(names, folders, strict=True))]
        urls = start_each(stack, arguments.servers, arguments.model, flags)
        for url in urls.values():
            asyncio.run(await_names(url, names))
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
        for _ in range(arguments.runs + 1):
            for name, url in urls.items():
                base, adapters = (
                    asyncio.run(tokens_per_second(url, models, arguments.sequences, arguments.answer, arguments.rounds))
                    for models in (["model"], names)
                )
                rates[name].append((base, adapters))
        for name, found in rates.items():
            measured = found[1:]  # the first run is warm-up
            yield Result(
                server=name,
                base_tokens_per_second=statistics.median(base for base, _ in measured),
                adapters_tokens_per_second=statistics.median(adapters for _, adapters in measured),
                ratio=statistics.median(adapters / base for base, adapters in measured),
            )


def parse_arguments() -> Namespace:
    options = parser(__doc__, plot=False)
    options.add_argument("--servers", choices=PEERS, nargs="+", default=list(PEERS))
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="default: the demo model")
    options.add_argument("--adapters", type=at_least_one, default=8, help="different adapters (default 8)")
    options.add_argument("--rank", type=at_least_one, default=8, help="the rank of every adapter (default 8)")
    options.add_argument("--sequences", type=at_least_one, default=16, help="clients at once (default 16)")
    options.add_argument("--answer", type=at_least_one, default=128, help="the tokens of each answer (default 128)")
    options.add_argument("--rounds", type=at_least_one, default=2, help="the answers of each client (default 2)")
    options.add_argument("--runs", type=at_least_one, default=3, help="runs of each server (default 3)")
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()
    results = list(compare(arguments))
    show_table(
        f"{arguments.adapters} adapters of rank {arguments.rank}",
        ["server", "base tokens/s", "with adapters", "ratio"],
        [
            [
                result.server,
                f"{result.base_tokens_per_second:,.0f}",
                f"{result.adapters_tokens_per_second:,.0f}",
                f"{result.ratio:.2f}",
            ]
            for result in results
        ],
        (f"{arguments.sequences} clients, answers of {arguments.answer} tokens, {arguments.runs} runs", machine()),
    )
    save(arguments.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
