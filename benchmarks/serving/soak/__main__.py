"""Serve for minutes while requests try to hurt one another, and check that none does.

  python -m benchmarks.serving.soak                              ten minutes, 40 clients, three replicas
  python -m benchmarks.serving.soak --minutes 2 --poison-every 30   a short run: memory is reported, but not judged

A gateway and replicas of the demo model are started on loopback, with --check-integrity and a KV cache so small that
requests are preempted. Clients of two tenants send chats and completions, streamed and whole, short and long, with
n > 1 and with logprobs; some leave in the middle. In each interval one poisonous request crashes, hangs, or exhausts
the memory of each engine process that runs it. Meanwhile a separate process asks every server for /livez each 20 ms,
and the memory of all processes is sampled.

Expected: no 5xx but for the poisonous requests and those lost with one twice, no gap in /livez over 100 ms, every KV
cache block free at the end, and flat memory. The exit status is 1 if an expectation failed; then the logs are kept. A
gap is not judged if the probe's own sleeps were over 50 ms late, because the machine is then too busy. Three replicas
and the clients need four cores to themselves for that.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from rich.console import Console

from benchmarks.report import ROOT, at_least_one, machine, parser, save, show_table
from benchmarks.serving.livez_probe import Answers
from benchmarks.serving.soak.clients import Clients
from benchmarks.serving.soak.expectations import Expectation, Observed, judge
from benchmarks.serving.soak.memory import Sample, sample
from benchmarks.serving.soak.servers import Fleet, metrics

INTERRUPTED = 130
"""The exit status after SIGTERM or Ctrl-C."""
_PROBE_SECONDS = 0.02
_SAMPLE_SECONDS = 2.0
_PROGRESS_SECONDS = 15.0
_END_SECONDS = 300
"""The time in which the last requests must end, and every replica must be ready and idle."""
_IN_USE = ("vllm:num_requests_running", "vllm:num_requests_waiting", "quire_kv_blocks/used")

_console = Console(stderr=True, highlight=False)


def positive(text: str) -> float:
    """Parse a positive number from the command line."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} should be a number above 0")
    return number


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, plot=False)
    options.add_argument("--minutes", type=positive, default=10.0, help="the duration of the load (default 10)")
    options.add_argument("--clients", type=at_least_one, default=40, help="(default 40)")
    options.add_argument("--replicas", type=at_least_one, default=3, help="a poisonous request ends two (default 3)")
    options.add_argument(
        "--poison-every", type=positive, default=60.0, metavar="SECONDS", help="the interval (default 60)"
    )
    options.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the servers in this folder")
    return options.parse_args()


async def _interruptible(work: Coroutine[Any, Any, Observed]) -> Observed:
    """Run ``work``; SIGTERM cancels it, as Ctrl-C does, so that no server is left behind."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise SystemExit(INTERRUPTED) from None


async def soak(arguments: argparse.Namespace, folder: Path) -> Observed:
    """Run the servers and the load, and return what was observed."""
    fleet = Fleet(folder, arguments.replicas)
    probing: Process | None = None
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        try:
            _console.print(f"starting a gateway and {arguments.replicas} replicas; logs in {folder}")
            await fleet.start(session)
            probing = await _start_probe(fleet)
            return await _load(arguments, fleet, session, probing)
        finally:
            if probing is not None and probing.returncode is None:
                probing.kill()
                await probing.wait()
            await fleet.stop()


async def _load(
    arguments: argparse.Namespace, fleet: Fleet, session: aiohttp.ClientSession, probing: Process
) -> Observed:
    loop = asyncio.get_running_loop()
    began, seconds = loop.time(), arguments.minutes * 60
    clients, memory = Clients(session, fleet, began), list[Sample]()
    poisoning = asyncio.create_task(clients.poison(arguments.poison_every))
    background = [
        asyncio.create_task(fleet.supervise(session, began)),
        asyncio.create_task(_sample(fleet, memory, began)),
        asyncio.create_task(_report(clients, fleet, began)),
        poisoning,
    ]
    running = [asyncio.create_task(clients.run(number)) for number in range(arguments.clients)]
    failed, _ = await asyncio.wait({*running, *background}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    for task in failed:
        task.result()
    clients.stop.set()
    try:
        await asyncio.wait_for(asyncio.gather(*running), _END_SECONDS)
    except TimeoutError:
        clients.tally.broken[f"no end within {_END_SECONDS} s"] += 1
    lasted = loop.time() - began
    left = await _left_when_idle(fleet, session)
    for task in background:
        task.cancel()
    counters = sum([await metrics(session, replica) for replica in fleet.replicas], Counter(fleet.counters))
    return Observed(
        seconds=lasted,
        tally=clients.tally,
        deaths=fleet.deaths,
        num_engine_restarts=int(counters["quire_engine_restarts_total"]),
        num_server_restarts=fleet.num_server_restarts,
        num_preemptions=int(counters["vllm:num_preemptions_total"]),
        left=left,
        probes=await _end_probe(probing),
        memory=[each for each in memory if each.seconds <= lasted],
    )


async def _start_probe(fleet: Fleet) -> Process:
    targets = [f"{server.name}=127.0.0.1:{server.port}" for server in fleet.servers]
    command = ("-m", "benchmarks.serving.livez_probe", str(_PROBE_SECONDS), *targets)
    return await asyncio.create_subprocess_exec(sys.executable, *command, stdin=PIPE, stdout=PIPE, cwd=ROOT)


async def _end_probe(probing: Process) -> list[Answers]:
    output, _ = await probing.communicate(b"")
    return [Answers(**answers) for answers in json.loads(output)]


async def _sample(fleet: Fleet, samples: list[Sample], began: float) -> None:
    while True:
        samples += sample(fleet, asyncio.get_running_loop().time() - began)
        await asyncio.sleep(_SAMPLE_SECONDS)


async def _report(clients: Clients, fleet: Fleet, began: float) -> None:
    """Print the progress until cancelled."""
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        tally, seconds = clients.tally, asyncio.get_running_loop().time() - began
        _console.print(
            f"{seconds:4.0f} s: {tally.complete.total()} complete, {tally.num_cancelled} cancelled, "
            f"{len(tally.poisons)} poisonous, {len(fleet.deaths)} engines died, {len(tally.cuts)} streams cut, "
            f"{tally.errors.total() + tally.broken.total()} errors; load average {os.getloadavg()[0]:.1f}"
        )


async def _left_when_idle(fleet: Fleet, session: aiohttp.ClientSession) -> dict[str, float]:
    """Return what is in use once nothing is, or when the time for that is over."""
    deadline = asyncio.get_running_loop().time() + _END_SECONDS
    while True:
        left: dict[str, float] = {}
        try:
            for replica in fleet.replicas:
                found = await metrics(session, replica)
                left |= {f"{replica.name} {name}": found[name] for name in _IN_USE}
            found = await metrics(session, fleet.gateway)
            left["gateway requests in flight"] = found["quire_gateway_requests_in_flight"]
            left["gateway body bytes"] = found["quire_gateway_body_bytes"]
            left["replicas that are not ready"] = 0 if await fleet.all_ready(session) else 1
        except aiohttp.ClientError:
            left["replicas that are not ready"] = 1
        if not any(left.values()) or asyncio.get_running_loop().time() > deadline:
            return left
        await asyncio.sleep(0.5)


def details(observed: Observed) -> dict[str, Any]:
    """Return what lies behind the expectations, for the JSON file."""
    tally = observed.tally
    # asdict would count the items of a Counter again.
    counts = {name: value for name, value in vars(tally).items() if isinstance(value, int | Counter)}
    lists: dict[str, Sequence[Any]] = {
        "cuts": tally.cuts,
        "poisons": tally.poisons,
        "deaths": observed.deaths,
        "probes": observed.probes,
    }
    return counts | {name: [asdict(each) for each in listed] for name, listed in lists.items()}


def show(arguments: argparse.Namespace, observed: Observed, expectations: list[Expectation]) -> None:
    tally = observed.tally
    lines = [[each.name, each.found, each.verdict] for each in expectations]
    notes = (
        f"{arguments.clients} clients, {arguments.replicas} replicas, {observed.seconds:.0f} s, load average "
        f"{os.getloadavg()[0]:.1f} at the end: {tally.complete.total()} complete answers of "
        f"{len(tally.complete)} kinds, {len(tally.poisons)} poisonous requests, "
        f"{observed.num_server_restarts} servers started again",
        machine(),
    )
    show_table("Soak", ["expectation", "found", "verdict"], lines, notes)


def main() -> int:
    """Run the soak, and return the exit status."""
    arguments = parse_arguments()
    folder = Path(tempfile.mkdtemp(prefix="quire-soak-")) if arguments.logs is None else arguments.logs
    folder.mkdir(parents=True, exist_ok=True)
    observed = uvloop.run(_interruptible(soak(arguments, folder)))
    expectations = judge(observed)
    show(arguments, observed, expectations)
    save(arguments.json, [*map(asdict, expectations), details(observed)])
    if any(each.verdict == "failed" for each in expectations):
        _console.print(f"an expectation failed; the logs are in {folder}")
        return 1
    if arguments.logs is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
