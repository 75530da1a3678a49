"""Parts of the benchmarks that compare each server's rate with a feature to its own rate without it.

Servers get the same requests, in turns, and a first run as warm-up. ``started`` starts them.
"""

import argparse
import asyncio
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import aiohttp

from benchmarks.report import at_least_one, machine, parser, save, show_table
from benchmarks.serving.comparison.started import PEERS

Server = TypeVar("Server")
Found = TypeVar("Found")
Body = dict[str, Any]


def peers_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all these benchmarks."""
    options = parser(description, plot=False)
    options.add_argument("--servers", choices=PEERS, nargs="+", default=list(PEERS))
    options.add_argument("--runs", type=at_least_one, default=3, help="runs of each server (default 3)")
    return options


async def seconds_to_answer(
    url: str, clients: Sequence[Iterable[Body]], answered: Callable[[Body, aiohttp.ClientResponse, Any], None]
) -> float:
    """Return the seconds in which concurrent clients get their answers, each one after the other.

    Clients may share an iterator. ``answered`` gets each body, the response and its document.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def client(bodies: Iterable[Body]) -> None:
            for body in bodies:
                async with session.post(url, json=body) as response:
                    answered(body, response, await response.json())

        began = perf_counter()
        await asyncio.gather(*(client(bodies) for bodies in clients))
        return perf_counter() - began


def tokens_per_second(url: str, clients: Sequence[Iterable[Body]]) -> float:
    """Return the rate of completion tokens of these clients. Raise ClientResponseError for a refused request."""
    tokens = 0

    def count(body: Body, response: aiohttp.ClientResponse, found: Any) -> None:
        nonlocal tokens
        response.raise_for_status()
        tokens += found["usage"]["completion_tokens"]

    seconds = asyncio.run(seconds_to_answer(url, clients, count))
    return tokens / seconds


def in_turns(servers: Mapping[str, Server], runs: int, measure: Callable[[Server], Found]) -> dict[str, list[Found]]:
    """Return what ``measure`` finds at each server in so many interleaved runs after the warm-up."""
    found: dict[str, list[Found]] = {name: [] for name in servers}
    for _ in range(runs + 1):
        for name, server in servers.items():
            found[name].append(measure(server))
    return {name: measured[1:] for name, measured in found.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The medians of one server, without and with the feature."""

    server: str
    plain_tokens_per_second: float
    feature_tokens_per_second: float
    ratio: float
    lowest_ratio: float
    counts: Mapping[str, int]
    """Further numbers by what they count, such as clients or valid answers."""

    @classmethod
    def of(cls, server: str, pairs: Sequence[tuple[float, float]], counts: Mapping[str, int]) -> "Result":
        """Return the medians of pairs of rates."""
        ratios = [feature / plain for plain, feature in pairs]
        return cls(
            server=server,
            plain_tokens_per_second=statistics.median(plain for plain, _ in pairs),
            feature_tokens_per_second=statistics.median(feature for _, feature in pairs),
            ratio=statistics.median(ratios),
            lowest_ratio=min(ratios),
            counts=dict(counts),
        )


def report(title: str, feature: str, results: Sequence[Result], conditions: str, file: Path | None) -> None:
    """Print the results as a table with a column named after the feature, and write them to ``file`` if it is given."""
    rows = [
        [
            result.server,
            f"{result.plain_tokens_per_second:,.0f}",
            f"{result.feature_tokens_per_second:,.0f}",
            f"{result.ratio:.2f}",
            f"{result.lowest_ratio:.2f}",
            ", ".join(f"{number} {what}" for what, number in sorted(result.counts.items())),
        ]
        for result in results
    ]
    columns = ["server", "plain tokens/s", feature, "ratio", "lowest", "counts"]
    show_table(title, columns, rows, (conditions, machine()))
    save(file, [asdict(result) for result in results])
