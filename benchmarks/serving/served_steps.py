"""A server's steps under steady streams: by its own metrics, and by the CPU time of its two processes from /proc."""

import asyncio
import json
import re
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from processes import Server, cpu_seconds

_PARTS = ("schedule", "prepare", "swap", "run", "sample", "output")
_POLL_SECONDS = 0.1
_MAX_START_SECONDS = 120.0
_VOCABULARY = 2048
"""Prompts are of these tokens; every model has so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSteps:
    """Means over the steps of the time watched."""

    streams: int
    steps: int
    period_seconds: float
    """From step to step."""
    parts: dict[str, float]
    """Seconds of a step by the engine's metrics."""
    api_cpu_seconds: float
    engine_cpu_seconds: float
    """Of a step, by process."""
    tokens_per_second: float

    @property
    def between_seconds(self) -> float:
        """In which the engine process takes in messages, tells its figures, or waits for a CPU."""
        return max(0.0, self.period_seconds - sum(self.parts.values()))

    @property
    def api_cpu_per_token(self) -> float:
        return self.api_cpu_seconds / (self.tokens_per_second * self.period_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    time: float
    api: float
    engine: float
    figures: Mapping[str, float]


class _Sink(asyncio.Protocol):
    """Asks for one stream, and lets it pass."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.last = b""
        self.ended = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.last = data

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended = True

    def eof_received(self) -> None:
        self.ended = True

    def close(self) -> None:
        self._transport.close()


async def watch(server: Server, *, streams: int, context: int, max_tokens: int, seconds: float) -> ServedSteps:
    """``streams`` of up to ``max_tokens`` tokens are read at once; they are closed when ``seconds`` are over."""
    loop = asyncio.get_running_loop()
    sinks = []
    for number in range(streams):
        sink = _Sink(_request(server, [(number * 31 + i * 7) % _VOCABULARY for i in range(context)], max_tokens))
        await loop.create_connection(lambda sink=sink: sink, server.host, server.port)
        sinks.append(sink)
    try:
        await _until_all_decode(server, sinks, streams)
        before = await _read(server)
        await asyncio.sleep(seconds)
        after = await _read(server)
        if after.figures["running"] != streams:
            raise SystemExit(f"a stream ended before the {seconds:g} s were over: {_told(sinks)}")
    finally:
        for sink in sinks:
            sink.close()
    while (await _read(server)).figures["running"]:
        await asyncio.sleep(_POLL_SECONDS)
    return _difference(before, after, streams)


def _difference(before: _Reading, after: _Reading, streams: int) -> ServedSteps:
    gained = {name: value - before.figures[name] for name, value in after.figures.items()}
    steps = round(gained["steps"])
    if not steps:
        raise SystemExit("no step in the time watched: ask for more --seconds")
    wall = after.time - before.time
    return ServedSteps(
        streams=streams,
        steps=steps,
        period_seconds=wall / steps,
        parts={part: gained[part] / steps for part in _PARTS},
        api_cpu_seconds=(after.api - before.api) / steps,
        engine_cpu_seconds=(after.engine - before.engine) / steps,
        tokens_per_second=gained["tokens"] / wall,
    )


async def _until_all_decode(server: Server, sinks: list[_Sink], streams: int) -> None:
    """Every prompt is computed, and steps are what they will be."""
    deadline = time.monotonic() + _MAX_START_SECONDS
    while True:
        figures = (await _read(server)).figures
        if figures["running"] == streams and figures["tokens"] > 0 and not figures["prefilling"]:
            break
        if any(sink.ended or b'"error"' in sink.last for sink in sinks) or time.monotonic() > deadline:
            raise SystemExit(f"{streams} streams never ran together: {_told(sinks)}")
        await asyncio.sleep(_POLL_SECONDS)


def _told(sinks: list[_Sink]) -> str:
    return repr(sinks[-1].last[-200:])


async def _read(server: Server) -> _Reading:
    """In a thread, so that the streams are read on."""
    url = f"http://{server.host}:{server.port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read().decode())
    figures = {part: _value(text, "quire_step_seconds_total", f'part="{part}"') for part in _PARTS}
    figures["steps"] = _value(text, "quire_steps_total")
    figures["tokens"] = _value(text, "vllm:generation_tokens_total")
    figures["running"] = _value(text, "vllm:num_requests_running")
    figures["prefilling"] = _value(text, "quire_pending_prefill_tokens")
    return _Reading(
        time=time.perf_counter(),
        api=cpu_seconds(server.api_pid),
        engine=cpu_seconds(server.engine_pid),
        figures=figures,
    )


def _value(text: str, name: str, label: str = "") -> float:
    """0 for a counter that has not begun; one that the server does not know at all is our mistake."""
    if f"# TYPE {name} " not in text:
        raise SystemExit(f"the server's /metrics has no {name}")
    found = re.search(rf"^{re.escape(name)}\{{[^}}]*{re.escape(label)}[^}}]*\}} (\S+)$", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def _request(server: Server, prompt: list[int], max_tokens: int) -> bytes:
    fields = {"model": "demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0.0}
    body = json.dumps({**fields, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {server.host}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body
