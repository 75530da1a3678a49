"""Measure what the gateway adds to the time to first token: direct and through it, interleaved, with a fake replica.

    python -m benchmarks.serving.gateway_overhead [--requests 2000] [--concurrency 1 16] [--json FILE]

The replica is a bare asyncio protocol in a process of its own that answers at once with a stream of tokens, so that the
rest is the work of the gateway and the client. Requests alternate between the two ways (A B A B).
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import aiohttp
import uvloop

from benchmarks.report import ROOT, machine, parser, save, show_table

TOKENS = 32
BODY = json.dumps({"model": "fake", "stream": True, "messages": [{"role": "user", "content": "word " * 400}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
METRICS = b"""vllm:num_requests_running{engine="0"} 0
vllm:num_requests_waiting{engine="0"} 0
vllm:kv_cache_usage_perc{engine="0"} 0
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    concurrency: int
    direct_p50_ms: float
    direct_p99_ms: float
    gateway_p50_ms: float
    gateway_p99_ms: float
    added_p50_ms: float
    gateway_tokens_per_second: float


class FakeReplica(asyncio.Protocol):
    """Reads requests by their Content-Length and answers each with a stream of tokens."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A uvloop transport is not an instance of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            length = 0
            if (at := head.find(b"content-length:")) >= 0:
                length = int(head[at + 15 :].split(b"\r\n")[0])
            if len(self._buffer) < end + 4 + length:
                return
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(metrics=head.startswith(b"get"))

    def _answer(self, *, metrics: bool) -> None:
        if metrics:
            self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(METRICS), METRICS))
            return
        token = b'data: {"choices": [{"delta": {"content": "token"}}]}\n\n'
        chunk = b"%x\r\n%s\r\n" % (len(token), token)
        self._transport.write(HEAD + chunk)
        for _ in range(TOKENS - 1):
            self._transport.write(chunk)
        self._transport.write(b"0\r\n\r\n")


async def serve_fake() -> None:
    server = await asyncio.get_running_loop().create_server(FakeReplica, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()


async def time_to_first_token(client: aiohttp.ClientSession, url: str) -> float:
    started = time.perf_counter()
    async with client.post(f"{url}/v1/chat/completions", data=BODY) as response:
        await response.content.readany()
        first = time.perf_counter() - started
        await response.read()
        assert response.status == 200
    return first


async def measure(direct: str, gateway: str, *, requests: int, concurrency: int) -> Row:
    times: dict[str, list[float]] = {direct: [], gateway: []}
    busy = {direct: 0.0, gateway: 0.0}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        for url in (direct, gateway):
            await asyncio.gather(*(time_to_first_token(client, url) for _ in range(max(50, concurrency))))
        rounds = max(1, requests // concurrency)
        for _ in range(rounds):
            for url in (direct, gateway):
                started = time.perf_counter()
                times[url] += await asyncio.gather(*(time_to_first_token(client, url) for _ in range(concurrency)))
                busy[url] += time.perf_counter() - started
    return Row(
        concurrency=concurrency,
        direct_p50_ms=percentile(times[direct], 50),
        direct_p99_ms=percentile(times[direct], 99),
        gateway_p50_ms=percentile(times[gateway], 50),
        gateway_p99_ms=percentile(times[gateway], 99),
        added_p50_ms=percentile(times[gateway], 50) - percentile(times[direct], 50),
        gateway_tokens_per_second=len(times[gateway]) * TOKENS / busy[gateway],
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile of ``values`` in milliseconds."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1] * 1000


def start_gateway(folder: Path, replica: str) -> tuple[subprocess.Popen[str], str]:
    endpoints = folder / "endpoints.json"
    endpoints.write_text(json.dumps({"models": [{"name": "fake", "endpoints": [{"id": "fake-0", "url": replica}]}]}))
    command = [sys.executable, "-m", "quire_gateway", "--host", "127.0.0.1", "--port", "0"]
    command += ["--endpoints-file", str(endpoints)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        message = str(json.loads(line)["message"])
        if message.startswith("listening on "):
            address = message.removeprefix("listening on ")
        if message.startswith("ready replicas"):
            return process, address
    raise SystemExit("the gateway did not start")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=2000, help="requests per way and concurrency (default 2000)")
    options.add_argument("--concurrency", type=int, nargs="+", default=[1, 16], help="(default 1 16)")
    options.add_argument("--serve-fake", action="store_true", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.serve_fake:
        uvloop.run(serve_fake())
        return
    replica = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.serving.gateway_overhead", "--serve-fake"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with tempfile.TemporaryDirectory() as folder:
        assert replica.stdout is not None
        direct = f"http://127.0.0.1:{int(replica.stdout.readline())}"
        gateway, address = start_gateway(Path(folder), direct)
        try:
            rows = [
                uvloop.run(measure(direct, address, requests=args.requests, concurrency=concurrency))
                for concurrency in args.concurrency
            ]
        finally:
            for process in (gateway, replica):
                process.terminate()
                process.wait()
    lines = [
        [
            str(row.concurrency),
            *(f"{row.direct_p50_ms:.2f}", f"{row.direct_p99_ms:.2f}"),
            *(f"{row.gateway_p50_ms:.2f}", f"{row.gateway_p99_ms:.2f}", f"{row.added_p50_ms:.2f}"),
            f"{row.gateway_tokens_per_second:,.0f}",
        ]
        for row in rows
    ]
    columns = ["concurrency", "direct p50 ms", "p99 ms", "gateway p50 ms", "p99 ms", "added p50 ms", "tokens/s"]
    notes = (f"aiohttp {aiohttp.__version__}, load average {os.getloadavg()[0]:.1f}", machine())
    show_table("Time to first token", columns, lines, notes)
    save(args.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
