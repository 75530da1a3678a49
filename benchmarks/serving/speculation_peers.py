#!/usr/bin/env python3
"""Compare the speed-up by speculative decoding of quire with that of vLLM, on the same pair of models.

    python -m benchmarks.serving.speculation_peers [--method draft_model] [--layers 18] [--sequences 1 4]

Each of the two servers runs without and with speculation, on the demo model, padded with layers of no effect so that
its step costs several of the draft's. All four answer the same questions greedily, one server at a time and in turns.
The ratio of a server is that of its tokens per second with and without speculation. A server that does not start is
reported with the last lines of its log. vLLM is installed by ``make peers``.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import aiohttp

from benchmarks.models.padded_model import write_padded_model
from benchmarks.report import DEMO_MODEL, at_least_one, interrupt_on_terminate, machine, parser, save, show_table
from benchmarks.serving.comparison.process_tree import ServerError
from benchmarks.serving.comparison.started import PEERS, say, start
from benchmarks.serving.draft_pairs import DRAFTS, SUBJECTS


@dataclass(frozen=True, kw_only=True)
class Result:
    """The speed-up of one server."""

    server: str
    sequences: int
    plain_tokens_per_second: float
    speculating_tokens_per_second: float
    ratio: float
    lowest_ratio: float


async def tokens_per_second(url: str, sequences: int, answer: int, rounds: int) -> float:
    """Return the rate at which so many clients get greedy answers of ``answer`` tokens, each ``rounds`` of them."""
    questions = iter(list(islice(cycle(SUBJECTS), sequences * rounds)))
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def client() -> int:
            tokens = 0
            for subject in questions:
                body = {
                    "model": "model",
                    "messages": [{"role": "user", "content": f"Explain {subject}."}],
                    "max_tokens": answer,
                    "temperature": 0.0,
                    "ignore_eos": True,
                }
                async with session.post(f"{url}/v1/chat/completions", json=body) as response:
                    found = await response.json()
                    response.raise_for_status()
                tokens += found["usage"]["completion_tokens"]
            return tokens

        began = perf_counter()
        counts = await asyncio.gather(*(client() for _ in range(sequences)))
        return sum(counts) / (perf_counter() - began)


def compare(arguments: argparse.Namespace) -> Iterator[Result]:
    """Yield the speed-up of each server that starts with and without speculation."""
    draft = {
        "method": arguments.method,
        "model": str(DRAFTS[arguments.method]),
        "num_speculative_tokens": arguments.drafts,
    }
    pairs: dict[str, tuple[str, str]] = {}
    with TemporaryDirectory(prefix="quire-padded-") as folder, ExitStack() as stack:
        write_padded_model(Path(folder), DEMO_MODEL, arguments.layers)
        for name in arguments.servers:
            try:
                urls = [
                    start(stack, name, Path(folder), flags)
                    for flags in ((), ("--speculative-config", json.dumps(draft)))
                ]
            except ServerError as error:
                say(str(error))
                continue
            pairs[name] = (urls[0], urls[1])
        for sequences in arguments.sequences:
            rates: dict[str, list[tuple[float, float]]] = {name: [] for name in pairs}
            for _ in range(arguments.runs + 1):
                for name, addresses in pairs.items():
                    both = [
                        asyncio.run(tokens_per_second(url, sequences, arguments.answer, arguments.rounds))
                        for url in addresses
                    ]
                    rates[name].append((both[0], both[1]))
            for name, found in rates.items():
                measured = found[1:]  # the first run is warm-up
                ratios = [speculating / plain for plain, speculating in measured]
                yield Result(
                    server=name,
                    sequences=sequences,
                    plain_tokens_per_second=statistics.median(plain for plain, _ in measured),
                    speculating_tokens_per_second=statistics.median(speculating for _, speculating in measured),
                    ratio=statistics.median(ratios),
                    lowest_ratio=min(ratios),
                )


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, plot=False)
    options.add_argument("--servers", choices=PEERS, nargs="+", default=list(PEERS))
    options.add_argument("--method", choices=tuple(DRAFTS), default="draft_model")
    options.add_argument("--layers", type=int, default=18, help="the further layers of the target (default 18)")
    options.add_argument("--drafts", type=at_least_one, default=4, help="num_speculative_tokens (default 4)")
    options.add_argument("--sequences", type=at_least_one, nargs="+", default=[1, 4])
    options.add_argument("--answer", type=at_least_one, default=48, help="the tokens of each answer (default 48)")
    options.add_argument("--rounds", type=at_least_one, default=3, help="the answers of each client (default 3)")
    options.add_argument("--runs", type=at_least_one, default=3, help="runs of each server (default 3)")
    return options.parse_args()


def main() -> None:
    arguments = parse_arguments()
    interrupt_on_terminate()
    results = list(compare(arguments))
    show_table(
        f"speed-up by speculation ({arguments.method}, up to {arguments.drafts} drafts)",
        ["server", "sequences", "plain tokens/s", "speculating", "ratio", "lowest"],
        [
            [
                result.server,
                str(result.sequences),
                f"{result.plain_tokens_per_second:,.0f}",
                f"{result.speculating_tokens_per_second:,.0f}",
                f"{result.ratio:.2f}",
                f"{result.lowest_ratio:.2f}",
            ]
            for result in results
        ],
        (f"answers of {arguments.answer} tokens, {arguments.runs} runs", machine()),
    )
    save(arguments.json, [asdict(result) for result in results])


if __name__ == "__main__":
    main()
