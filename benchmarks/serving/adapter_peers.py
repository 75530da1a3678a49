#!/usr/bin/env python3
"""Compare the cost of low-rank adapters (LoRA) in quire and in vLLM: the same adapters, model, and requests.

    python -m benchmarks.serving.adapter_peers [--adapters 8] [--rank 8] [--sequences 16] [--runs 3]

Each server has slots for all adapters. Its clients get greedy answers of the same length, once all from the base model
and once each from one of the adapters. Servers run one at a time and in turns. The ratio is that of a server's own
rates with adapters and of its base. vLLM is installed by ``make peers``.
"""

import asyncio
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from benchmarks.models.random_adapter import write_random_adapters
from benchmarks.report import DEMO_MODEL, at_least_one, interrupt_on_terminate
from benchmarks.serving.comparison.paired import Body, Result, in_turns, peers_parser, report, tokens_per_second
from benchmarks.serving.comparison.started import start_each


def requests(names: list[str], sequences: int, answer: int, rounds: int) -> list[list[Body]]:
    """Return the requests of so many clients, each with a name of its own, for ``rounds`` answers one by one."""
    return [
        [
            {
                "model": names[number % len(names)],
                "prompt": f"Explain record {number} of {turn}.",
                "max_tokens": answer,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            for turn in range(rounds)
        ]
        for number in range(sequences)
    ]


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
        both = [
            requests(models, arguments.sequences, arguments.answer, arguments.rounds) for models in (["model"], names)
        ]

        def measure(url: str) -> tuple[float, float]:
            base, adapters = (tokens_per_second(f"{url}/v1/completions", clients) for clients in both)
            return base, adapters

        for name, pairs in in_turns(urls, arguments.runs, measure).items():
            yield Result.of(name, pairs, {"clients": arguments.sequences})


def parse_arguments() -> Namespace:
    options = peers_parser(__doc__)
    options.add_argument("--model", type=Path, default=DEMO_MODEL, help="default: the demo model")
    options.add_argument("--adapters", type=at_least_one, default=8, help="different adapters (default 8)")
    options.add_argument("--rank", type=at_least_one, default=8, help="the rank of every adapter (default 8)")
    options.add_argument("--sequences", type=at_least_one, default=16, help="clients at once (default 16)")
    options.add_argument("--answer", type=at_least_one, default=128, help="the tokens of each answer (default 128)")
    options.add_argument("--rounds", type=at_least_one, default=2, help="the answers of each client (default 2)")
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()
    report(
        f"{arguments.adapters} adapters of rank {arguments.rank}",
        "with adapters",
        list(compare(arguments)),
        f"answers of {arguments.answer} tokens, {arguments.runs} runs",
        arguments.json,
    )


if __name__ == "__main__":
    main()
