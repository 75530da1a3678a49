"""Judge real canaries: a gateway and two engines of the demo model under traffic, and the operator's own decisions.

    python -m benchmarks.canary.live                        every kind of canary once
    python -m benchmarks.canary.live --kinds same,layer     some kinds
    python -m benchmarks.canary.live --runs 10 --kinds same

The replicas listen on loopback. Clients send requests with temperature 0 one after the other. As in a cluster, the
figures of the gateway are polled, the gates judged, and the record advanced; here every 2 seconds instead of 15. A
canary is cold for a minute. The faults of "1 error in 100", "layer" and "leak" are those of
``benchmarks/canary/faults``. A replica that exceeds its memory limit is killed and started again, as in a pod. The exit
status is 1 if a bad canary is promoted or a good one rolled back.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

import aiohttp
import uvloop
from rich.console import Console

from benchmarks.report import DEMO_MODEL, at_least_one, machine, parser, save, show_table
from benchmarks.serving.comparison.process_tree import free_port
from benchmarks.serving.soak.servers import MODEL, Server
from quire_common.contract.gateway import CANARY, STABLE, TRACKS_PATH
from quire_operator.domain.canary.figures import Tracks, read_tracks
from quire_operator.domain.canary.judgement import judge
from quire_operator.domain.canary.progress import Phase, Record, Situation, advance
from quire_operator.domain.resource import Canary, CanaryStep, Gate, GateMetric

_POLL_SECONDS = 2.0
_LONGEST_SECONDS = 1200.0
_START_SECONDS = 10.0
"""The time in which replicas of a canary start, and all requests go to the stable one."""
_FAULTS = Path(__file__).with_name("faults")
_GROWTH_BYTES = 256 << 20
"""The memory limit of a replica, above what it uses when it is ready."""
_LIMIT_SECONDS = 0.5
POLICY = Canary(
    steps=(CanaryStep(weight_percent=50, duration_seconds=10.0),),
    gates=(
        # Tails say little while two cores run the clients too: the median must not be worse by half.
        Gate(metric=GateMetric.TIME_TO_FIRST_TOKEN, percentile=50, max_increase_percent=50),
        Gate(metric=GateMetric.ERROR_RATE),
        Gate(metric=GateMetric.ANSWERS, max_percent=3.0),
    ),
    min_requests=200,
    answer_sample_percent=100.0,
)

_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of canary."""

    name: str
    is_good: bool
    flags: tuple[str, ...] = ()
    """The engine's flags that its spec changes."""
    fault: str = ""
    """A fault of ``benchmarks/canary/faults``."""


KINDS = (
    Kind(name="same", is_good=True),
    Kind(name="smaller batches", is_good=True, flags=("--max-num-seqs", "6")),
    Kind(name="slow under load", is_good=False, flags=("--max-num-seqs", "1")),
    Kind(name="slow", is_good=False, flags=("--max-num-batched-tokens", "8")),
    Kind(name="1 error in 100", is_good=False, fault="errors"),
    Kind(name="layer", is_good=False, fault="layer"),
    Kind(name="leak", is_good=False, fault="leak"),
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The end of one canary."""

    kind: str
    is_good: bool
    phase: str
    seconds: float
    requests: int
    """The requests of the canary until the verdict."""
    compared: int
    different: int
    message: str

    @property
    def is_right(self) -> bool:
        return self.phase == (Phase.PROMOTING if self.is_good else Phase.ROLLED_BACK).value


def engine(folder: Path, name: str, kind: Kind) -> Server:
    """Return an engine that is not started yet."""
    port = free_port()
    command = ["-m", "quire_engine", "--model", str(DEMO_MODEL), "--served-model-name", MODEL, "--threads", "1"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", "--drain-timeout", "1s"]
    command += ["--kv-cache-memory-bytes", "64MiB", *kind.flags]
    fault = {"PYTHONPATH": str(_FAULTS), "CANARY_FAULT": kind.fault} if kind.fault else {}
    return Server(name, command, port, folder / f"{name}.log", environment=fault)


class MemoryLimit:
    """The memory limit of a replica, which is killed above it and started again, as a kubelet does."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.failure: str | None = None
        """The reason why the replica restarted, as the operator words it; None if it has not."""

    async def watch(self) -> None:
        """Apply the limit until cancelled."""
        limit = resident_bytes(self._server.pid) + _GROWTH_BYTES
        while True:
            await asyncio.sleep(_LIMIT_SECONDS)
            if resident_bytes(self._server.pid) > limit and self.failure is None:
                self.failure = f"container engine of pod {self._server.name} restarted: OOMKilled with exit code 137"
                await self._server.kill()
                await self._server.start()


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


class Route:
    """The gateway's file of endpoints."""

    def __init__(self, path: Path, urls: dict[str, str]) -> None:
        self._path, self._urls = path, urls

    def write(self, record: Record | None) -> None:
        """List the replicas with the weight of the record."""
        canary = record is not None and record.phase is Phase.CANARY
        weight = record.weight_percent if record is not None and canary else 0
        route = {"revision": "new", "weight_percent": weight, "compared_percent": POLICY.compared_percent}
        endpoints = [{"id": track, "url": url, "ready": True, "track": track} for track, url in self._urls.items()]
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps({"models": [{"name": MODEL, "endpoints": endpoints, "canary": route}]}))
        fresh.replace(self._path)


async def client_loop(client: aiohttp.ClientSession, url: str, number: int) -> None:
    """Send one request after the other until cancelled."""
    count = 0
    while True:
        count += 1
        text = f"Client {number} asks for the {count}th time: tell me about the sea and the stars." + " Please." * (
            count % 9
        )
        body = {"model": MODEL, "prompt": text, "max_tokens": 16, "temperature": 0, "stream": True}
        # A stream on a replica that is killed breaks, which is an error of its track.
        with suppress(aiohttp.ClientError):
            async with client.post(f"{url}/v1/completions", json=body) as response:
                await response.read()


async def judged(client: aiohttp.ClientSession, url: str, route: Route, memory: MemoryLimit) -> tuple[Record, Tracks]:
    """Judge the canary until it is promoted or rolled back, or until the time is up."""
    record = advance(None, Situation(revision="old", differs=False), POLICY, now=monotonic())
    began, found = monotonic(), Tracks()
    while monotonic() < began + _LONGEST_SECONDS:
        async with client.get(f"{url}{TRACKS_PATH}") as response:
            found = read_tracks(await response.read()).get((MODEL, "new"), Tracks())
        results = judge(POLICY, found)
        situation = Situation(
            revision="new",
            differs=True,
            canary_ready=monotonic() > began + _START_SECONDS,
            failure=memory.failure,
            results=results,
            requests=found.canary.requests,
        )
        before, record = record, advance(record, situation, POLICY, now=monotonic())
        if record.phase in (Phase.PROMOTING, Phase.ROLLED_BACK):
            break
        if (record.phase, record.weight_percent) != (before.phase, before.weight_percent):
            route.write(record)
        _console.print("; ".join(f"{each.gate}: {each.verdict} {each.message}" for each in results))
        await asyncio.sleep(_POLL_SECONDS)
    return record, found


async def measure(kind: Kind, folder: Path, clients: int) -> Row:
    """Return how one canary ends."""
    servers = [engine(folder, STABLE, KINDS[0]), engine(folder, CANARY, kind)]
    port = free_port()
    endpoints = folder / "endpoints.json"
    command = ["-m", "quire_gateway", "--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "1s"]
    gateway = Server("gateway", [*command, "--endpoints-file", str(endpoints)], port, folder / "gateway.log")
    timeout = aiohttp.ClientTimeout(total=None)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)
        )
        route = Route(endpoints, {server.name: server.url for server in servers})
        route.write(None)
        for server in (*servers, gateway):
            stack.push_async_callback(server.stop)
            await server.start()
        for server in (*servers, gateway):
            await server.until_ready(client)
        memory = MemoryLimit(servers[1])
        tasks = [asyncio.create_task(client_loop(client, gateway.url, number)) for number in range(clients)]
        tasks.append(asyncio.create_task(memory.watch()))
        began = monotonic()
        try:
            record, found = await judged(client, gateway.url, route, memory)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return Row(
        kind=kind.name,
        is_good=kind.is_good,
        phase=record.phase.value,
        seconds=monotonic() - began,
        requests=found.canary.requests,
        compared=found.answers.compared,
        different=found.answers.different,
        message=record.message,
    )


def _kinds(text: str) -> Sequence[Kind]:
    known = {kind.name: kind for kind in KINDS}
    if unknown := [name for name in text.split(",") if name not in known]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return [known[name] for name in text.split(",")]


def main() -> int:
    """Run the command, and return the exit status."""
    options = parser(__doc__, plot=False)
    options.add_argument(
        "--kinds", type=_kinds, default=KINDS, metavar="NAMES", help="separated by commas (default: all)"
    )
    options.add_argument("--runs", type=at_least_one, default=1, help="runs of each kind (default 1)")
    options.add_argument("--clients", type=at_least_one, default=4, help="(default 4)")
    arguments = options.parse_args()
    rows = []
    for kind in arguments.kinds:
        for _ in range(arguments.runs):
            with tempfile.TemporaryDirectory(prefix="quire-canary-") as folder:
                rows.append(uvloop.run(measure(kind, Path(folder), arguments.clients)))
            _console.print(rows[-1])
    columns = ["canary", "end", "seconds", "requests", "compared", "different"]
    lines = [
        [row.kind, row.phase, f"{row.seconds:.0f}", str(row.requests), str(row.compared), str(row.different)]
        for row in rows
    ]
    show_table(f"canaries under {arguments.clients} clients", columns, lines, (machine(),))
    save(arguments.json, [asdict(row) | {"right": row.is_right} for row in rows])
    return 0 if all(row.is_right for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
