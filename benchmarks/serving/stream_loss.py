"""End a replica in the middle of many streams, with and without ``--resumable-streams``, and compare their texts.

  python -m benchmarks.serving.stream_loss                  100 streams, three replicas: kill -9, then a drain of 5 s
  python -m benchmarks.serving.stream_loss --streams 20     fewer

A gateway and replicas of the demo model are started on loopback with --deterministic. Every stream is first read
without a disturbance. Then all are read again, and one replica ends while it has a part of them. A stream is broken if
it has no [DONE], and wrong if it has one and another text than before. The longest gap is that between two events of
one stream. The exit status is 1 if a resumable stream is broken or wrong.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp
import uvloop
from rich.console import Console

from benchmarks.report import DEMO_MODEL, at_least_one, machine, parser, save, show_table
from benchmarks.serving.comparison.process_tree import free_port
from benchmarks.serving.soak.servers import MODEL, Server

_DRAIN_SECONDS = 5
_POLL_SECONDS = 0.02

_console = Console(stderr=True, highlight=False)


@dataclass(frozen=True, kw_only=True)
class Stream:
    """One stream as its client saw it."""

    text: str
    is_done: bool
    longest_gap_seconds: float
    completion_tokens: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """The streams of one disturbance."""

    event: str
    resumable: bool
    streams: int
    broken: int
    wrong: int
    wrong_usage: int
    longest_gap_seconds: float
    undisturbed_gap_seconds: float
    exit_seconds: float
    """The time until the process of the replica has ended."""


class Servers:
    """A gateway and its replicas."""

    def __init__(self, folder: Path, num_replicas: int, *, resumable: bool) -> None:
        self._endpoints = folder / "endpoints.json"
        self.replicas = [self._replica(folder, f"chat-{number}", resumable) for number in range(num_replicas)]
        self.list_endpoints()
        port = free_port()
        command = ["-m", "quire_gateway", "--host", "127.0.0.1", "--port", str(port), "--drain-timeout", "2s"]
        self.gateway = Server("gateway", [*command, "--endpoints-file", str(self._endpoints)], port, folder / "gw.log")

    def _replica(self, folder: Path, name: str, resumable: bool) -> Server:
        port = free_port()
        command = ["-m", "quire_engine", "--model", str(DEMO_MODEL), "--served-model-name", MODEL, "--deterministic"]
        command += ["--host", "127.0.0.1", "--port", str(port), "--threads", "1", "--max-model-len", "2048"]
        command += ["--kv-cache-memory-bytes", "128MiB", "--drain-timeout", f"{_DRAIN_SECONDS}s"]
        command += ["--resumable-streams"] if resumable else []
        return Server(name, command, port, folder / f"{name}.log")

    def list_endpoints(self, *, terminating: str | None = None) -> None:
        """Write the gateway's file of endpoints."""
        listed = [
            {"id": each.name, "url": each.url, "ready": True, "terminating": each.name == terminating}
            for each in self.replicas
        ]
        fresh = self._endpoints.with_suffix(".new")
        fresh.write_text(json.dumps({"models": [{"name": MODEL, "endpoints": listed}]}))
        fresh.replace(self._endpoints)

    async def start(self, client: aiohttp.ClientSession) -> None:
        """Start every server."""
        for server in (*self.replicas, self.gateway):
            await server.start()
            await server.until_ready(client)

    async def stop(self) -> None:
        await asyncio.gather(*(server.stop() for server in (self.gateway, *self.replicas)))


async def read(client: aiohttp.ClientSession, url: str, number: int, tokens: int, progress: list[int]) -> Stream:
    """Read one stream; ``progress`` counts its events."""
    body = {"model": MODEL, "prompt": f"Story number {number}.", "max_tokens": tokens, "seed": number, "stream": True}
    body |= {"temperature": 1.0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    loop = asyncio.get_running_loop()
    text, is_done, gap, last, completion_tokens = "", False, 0.0, loop.time(), 0
    async with client.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        try:
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                now = loop.time()
                gap, last = max(gap, now - last if progress[number] else 0.0), now
                progress[number] += 1
                if line.strip() == b"data: [DONE]":
                    is_done = True
                    continue
                event = json.loads(line[6:])
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                completion_tokens = (event.get("usage") or {}).get("completion_tokens", completion_tokens)
        except aiohttp.ClientError:
            pass
    return Stream(text=text, is_done=is_done, longest_gap_seconds=gap, completion_tokens=completion_tokens)


async def measure(arguments: argparse.Namespace, folder: Path, event: str, *, resumable: bool) -> Row:
    """Return what one disturbance does."""
    servers = Servers(folder, arguments.replicas, resumable=resumable)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as client:
        try:
            await servers.start(client)
            progress = [0] * arguments.streams
            before = await _read_all(client, servers, arguments, progress)
            progress = [0] * arguments.streams
            reading = asyncio.create_task(_read_all(client, servers, arguments, progress))
            while min(progress) < 2 or sum(progress) < arguments.streams * arguments.tokens / 5:
                await asyncio.sleep(_POLL_SECONDS)
            exit_seconds = await _end(servers, event)
            after = await reading
        finally:
            await servers.stop()
    pairs = list(zip(before, after, strict=True))
    assert all(stream.is_done for stream in before), "a stream was broken without a disturbance"
    return Row(
        event=event,
        resumable=resumable,
        streams=arguments.streams,
        broken=sum(not now.is_done for now in after),
        wrong=sum(now.is_done and now.text != then.text for then, now in pairs),
        wrong_usage=sum(now.is_done and now.completion_tokens != then.completion_tokens for then, now in pairs),
        longest_gap_seconds=max(stream.longest_gap_seconds for stream in after),
        undisturbed_gap_seconds=max(stream.longest_gap_seconds for stream in before),
        exit_seconds=exit_seconds,
    )


async def _read_all(
    client: aiohttp.ClientSession, servers: Servers, arguments: argparse.Namespace, progress: list[int]
) -> list[Stream]:
    url = servers.gateway.url
    return await asyncio.gather(
        *(read(client, url, number, arguments.tokens, progress) for number in range(arguments.streams))
    )


async def _end(servers: Servers, event: str) -> float:
    replica = servers.replicas[0]
    began = asyncio.get_running_loop().time()
    assert replica.process is not None
    if event == "drain":
        servers.list_endpoints(terminating=replica.name)
    replica.process.send_signal(signal.SIGKILL if event == "kill -9" else signal.SIGTERM)
    await replica.process.wait()
    return asyncio.get_running_loop().time() - began


def main() -> int:
    """Run the command, and return the exit status."""
    options = parser(__doc__, plot=False)
    options.add_argument("--streams", type=at_least_one, default=100, help="(default 100)")
    options.add_argument("--replicas", type=at_least_one, default=3, help="(default 3)")
    options.add_argument("--tokens", type=at_least_one, default=200, help="tokens of each answer (default 200)")
    options.add_argument("--logs", type=Path, metavar="DIR", help="keep the logs of the servers in this folder")
    arguments = options.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="quire-streams-")) if arguments.logs is None else arguments.logs
    rows = []
    for event in ("kill -9", "drain"):
        for resumable in (True, False):
            place = folder / f"{event.replace(' ', '')}-{'resumable' if resumable else 'plain'}"
            place.mkdir(parents=True, exist_ok=True)
            rows.append(uvloop.run(measure(arguments, place, event, resumable=resumable)))
            _console.print(rows[-1])
    columns = ["event", "resumable", "broken", "wrong text", "wrong usage", "longest gap s", "undisturbed s", "exit s"]
    lines = [
        [
            row.event,
            "yes" if row.resumable else "no",
            *map(str, (row.broken, row.wrong, row.wrong_usage)),
            *(f"{x:.2f}" for x in (row.longest_gap_seconds, row.undisturbed_gap_seconds, row.exit_seconds)),
        ]
        for row in rows
    ]
    title = f"{arguments.streams} streams of {arguments.tokens} tokens, {arguments.replicas} replicas"
    show_table(title, columns, lines, (machine(),))
    save(arguments.json, [asdict(row) for row in rows])
    if any(row.resumable and (row.broken or row.wrong or row.wrong_usage) for row in rows):
        _console.print(f"a resumable stream failed; the logs are in {folder}")
        return 1
    if arguments.logs is None:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
