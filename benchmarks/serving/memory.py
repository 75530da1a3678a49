#!/usr/bin/env python3
"""Whether memory stays flat: resident memory of both processes over many requests, and the slope that is left.

    python benchmarks/serving/memory.py [--requests 10000] [--model demo|fake] [--json FILE] [--plot FILE.png]

Requests of many kinds run side by side: streamed and whole, chat and completions, several answers, logprobs, stop
strings, prompts that differ (so that the prefix cache fills and evicts), mistakes, and clients that leave in the
middle. The slope is of the second half: caches fill in the first.
"""

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
from processes import Server, resident_mib, serving, slope

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from report import save, show

EVERY = 500
CONCURRENCY = 16
API_LIMIT_MIB = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    requests: int
    api_mib: float
    engine_mib: float


def some_request(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """One of many kinds."""
    words = " ".join(str(chance.randrange(1000)) for _ in range(chance.randrange(2, 40)))
    fields: dict[str, Any] = {"model": "demo", "max_tokens": chance.randrange(1, 12), "stream": chance.random() < 0.5}
    kind = chance.randrange(6)
    if kind == 0:
        fields |= {"n": 2, "seed": chance.randrange(100)}
    elif kind == 1:
        fields |= {"logprobs": 3, "echo": False}
    elif kind == 2:
        fields |= {"stop": ["a", "the"]}
    elif kind == 3 and chance.random() < 0.5:
        fields |= {f"unknown_{chance.randrange(10**6)}": 1}
    if chance.random() < 0.5 or "echo" in fields:
        return "/v1/completions", {**fields, "prompt": words}
    return "/v1/chat/completions", {**fields, "messages": [{"role": "user", "content": words}]}


async def one_request(http: aiohttp.ClientSession, chance: random.Random) -> None:
    path, body = some_request(chance)
    leaves = chance.random() < 0.05
    async with http.post(path, json=body | ({"max_tokens": 400} if leaves else {})) as response:
        if leaves:
            await response.content.readany()
            response.close()
            return
        await response.read()
        assert response.status in (200, 400), response.status


async def run(server: Server, requests: int) -> list[Sample]:
    chance = random.Random(1)
    samples = [Sample(requests=0, api_mib=resident_mib(server.api_pid), engine_mib=resident_mib(server.engine_pid))]
    places = asyncio.Semaphore(CONCURRENCY)
    async with aiohttp.ClientSession(f"http://{server.host}:{server.port}") as http:

        async def in_turn() -> None:
            async with places:
                await one_request(http, chance)

        while samples[-1].requests < requests:
            await asyncio.gather(*(in_turn() for _ in range(EVERY)))
            api, engine = resident_mib(server.api_pid), resident_mib(server.engine_pid)
            samples.append(Sample(requests=samples[-1].requests + EVERY, api_mib=api, engine_mib=engine))
            print(f"{samples[-1].requests:7} requests: API {api:6.1f} MiB, engine {engine:7.1f} MiB", flush=True)
    return samples


def kib_per_thousand(samples: Sequence[Sample], values: Sequence[float]) -> float:
    """The slope of the second half."""
    half = len(samples) // 2
    return slope([sample.requests for sample in samples][half:], values[half:]) * 1024 * 1000


def plot(samples: Sequence[Sample], file: Path) -> None:
    from matplotlib import pyplot  # here, since only a plot needs it

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    requests = [sample.requests for sample in samples]
    axes.plot(requests, [sample.api_mib for sample in samples], label="API process")
    axes.plot(requests, [sample.engine_mib for sample in samples], label="engine process")
    axes.set(xlabel="requests", ylabel="resident MiB", ylim=(0, None))
    axes.legend()
    figure.savefig(file, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="(default 10000)")
    parser.add_argument("--model", choices=("demo", "fake"), default="demo", help="(default demo)")
    parser.add_argument("--json", type=Path, help="write the samples here too")
    parser.add_argument("--plot", type=Path, help="draw them (needs matplotlib)")
    args = parser.parse_args()
    if args.requests < 4 * EVERY:
        parser.error(f"--requests: at least {4 * EVERY}, or there is no slope to speak of")
    flags = ("--kv-cache-memory-bytes", "16MiB") if args.model == "demo" else ()
    with serving(*flags, fake={} if args.model == "fake" else None) as server:
        samples = asyncio.run(run(server, args.requests))
    api, engine = [sample.api_mib for sample in samples], [sample.engine_mib for sample in samples]
    rows = [
        (
            name,
            f"{values[0]:.1f}",
            f"{max(values):.1f}",
            f"{values[-1]:.1f}",
            f"{kib_per_thousand(samples, values):+.0f}",
        )
        for name, values in (("API process", api), ("engine process", engine))
    ]
    columns = ("", "at start, MiB", "highest, MiB", "at the end, MiB", "KiB per 1,000 requests, second half")
    title = f"Resident memory over {args.requests:,} requests, {args.model} model"
    show(title, columns, rows, (f"the API process is to stay within {API_LIMIT_MIB} MiB",))
    save(args.json, [asdict(sample) for sample in samples])
    if args.plot:
        plot(samples, args.plot)
    if max(api) > API_LIMIT_MIB:
        raise SystemExit(f"the API process took {max(api):.0f} MiB, more than {API_LIMIT_MIB}")


if __name__ == "__main__":
    main()
