#!/usr/bin/env python3
"""What it costs to stream tokens over HTTP: tokens/s of one API process, and the share of a CPU that it takes.

    python benchmarks/serving/http_overhead.py [--streams 1 64 256] [--seconds 4] [--json FILE]

The engine process runs the fake runner, so a step costs next to nothing; the tokenizer is the demo model's. Two paces:

paced      a step each --step-ms, as a model would: mostly each token is an event, a chunk and a write of its own
flat out   steps as fast as they go: what was drawn for a stream since it was last written goes out as one event

Tokens/s per core is tokens divided by the API process's CPU seconds (user and system, from /proc). The client is a bare
asyncio protocol in a process of its own; on a machine with few CPUs it competes with the server for them.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
from processes import Server, cpu_seconds, serving

sys.path.insert(0, str(Path(__file__).parents[1] / "kv"))
from report import save, show


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    pace: str
    streams: int
    tokens_per_second: float
    tokens_per_event: float
    api_cpu_share: float
    engine_cpu_share: float
    tokens_per_core_second: float
    """Of the API process."""


class Reader(asyncio.Protocol):
    """Asks for one stream on a connection of its own, and counts its events."""

    def __init__(self, request: bytes, done: "asyncio.Future[int]") -> None:
        self._request = request
        self._done = done
        self._events = 0
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        # A chunk of the HTTP body is written at once, so that an event's first bytes are seldom parted.
        self._events += data.count(b"data: {")
        self._last = (self._last + data)[-64:]
        if b"data: [DONE]" in self._last and self._last.endswith(b"0\r\n\r\n"):
            self._transport.close()
            if not self._done.done():
                self._done.set_result(self._events)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(SystemExit(f"a stream broke off after: {self._last!r}"))


async def read_streams(server: Server, *, streams: int, tokens: int) -> int:
    """Read so many streams of so many tokens at once; the events they brought."""
    fields: dict[str, Any] = {"model": "demo", "stream": True, "ignore_eos": True, "max_tokens": tokens}
    loop = asyncio.get_running_loop()
    waiting = []
    for number in range(streams):
        body = json.dumps({**fields, "messages": [{"role": "user", "content": f"Question {number}"}]}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
        request = f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
        done: asyncio.Future[int] = loop.create_future()
        await loop.create_connection(lambda request=request, done=done: Reader(request, done), server.host, server.port)
        waiting.append(done)
    return sum(await asyncio.gather(*waiting))


async def measure(server: Server, *, pace: str, streams: int, tokens: int, warm_up: int) -> Row:
    await read_streams(server, streams=streams, tokens=warm_up)
    api, engine, began = cpu_seconds(server.api_pid), cpu_seconds(server.engine_pid), time.perf_counter()
    events = await read_streams(server, streams=streams, tokens=tokens)
    seconds = time.perf_counter() - began
    api, engine = cpu_seconds(server.api_pid) - api, cpu_seconds(server.engine_pid) - engine
    total = streams * tokens
    return Row(
        pace=pace,
        streams=streams,
        tokens_per_second=total / seconds,
        tokens_per_event=total / events,
        api_cpu_share=api / seconds,
        engine_cpu_share=engine / seconds,
        tokens_per_core_second=total / max(api, 0.01),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64, 256], help="at once (default 1 64 256)")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement, about (default 4)")
    parser.add_argument("--step-ms", type=float, default=20.0, help="a step's time in the paced rows (default 20)")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    rows = []
    length = 4000
    for pace, step in (("paced", args.step_ms / 1000), ("flat out", 0.0)):
        # Room for every stream at its full length.
        fake = {
            "step_seconds": step,
            "max_model_len": length + 96,
            "num_blocks": max(args.streams) * (length // 16 + 8),
        }
        with serving("--max-num-seqs", str(max(args.streams)), fake=fake) as server:
            for streams in args.streams:
                tokens = min(length, int(args.seconds / step) if step else length)
                measuring = measure(server, pace=pace, streams=streams, tokens=tokens, warm_up=20)
                rows.append(uvloop.run(measuring))
    show(
        "Streaming over HTTP, one API process",
        ("pace", "streams", "tokens/s", "tokens per event", "API CPU", "engine CPU", "tokens/s per API core"),
        [
            (
                row.pace,
                str(row.streams),
                f"{row.tokens_per_second:,.0f}",
                f"{row.tokens_per_event:.2f}",
                f"{row.api_cpu_share:.0%}",
                f"{row.engine_cpu_share:.0%}",
                f"{row.tokens_per_core_second:,.0f}",
            )
            for row in rows
        ],
        (f"paced: a step each {args.step_ms:g} ms; flat out: what came since the last write is one event",),
    )
    save(args.json, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
