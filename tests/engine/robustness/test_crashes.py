"""Processes that are killed, stopped or terminated under load: what clients see, and when others are served again."""

import asyncio
import json
import os
import random
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Start = Callable[..., AbstractContextManager[Any]]


@dataclass
class StreamContents:
    """The contents of one stream as its client sees them."""

    tokens: int = 0
    finish_reason: str | None = None
    done: bool = False
    error: str | None = None
    broken: bool = False
    """The connection ended before the body did."""


async def read(http: httpx.AsyncClient, started: asyncio.Event | None = None, **fields: Any) -> StreamContents:
    body = {"model": "demo", "prompt": "The list", "stream": True, "ignore_eos": True, **fields}
    told = StreamContents()
    event = ""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                told.error = json.loads(await response.aread())["error"]["code"]
                return told
            async for line in response.aiter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                elif line == "data: [DONE]":
                    told.done = True
                elif line.startswith("data: ") and event == "error":
                    told.error = json.loads(line.removeprefix("data: "))["error"]["code"]
                elif line.startswith("data: "):
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    told.tokens += 1
                    told.finish_reason = choice["finish_reason"] or told.finish_reason
                    if started is not None:
                        started.set()
    except httpx.RemoteProtocolError:
        told.broken = True
    return told


def client(server: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    headers = {"authorization": f"Bearer {server.key}"}
    return httpx.AsyncClient(base_url=server.address, headers=headers, limits=limits, timeout=60)


async def under_load(http: httpx.AsyncClient, count: int, **fields: Any) -> list["asyncio.Task[StreamContents]"]:
    """Return that many streams, each of which has started."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(read(http, event, **fields)) for event in begun]
    for event in begun:
        await asyncio.wait_for(event.wait(), 30)
    return tasks


def failed_in_order(told: StreamContents) -> bool:
    """Return True if the stream has an error and no regular end."""
    return told.error == "engine_stopped" and told.finish_reason is None and not told.done and told.broken


async def served_again(http: httpx.AsyncClient) -> None:
    """Wait until a new request gets its answer; before that it may get 503."""
    async with asyncio.timeout(240):
        while not (told := await read(http, max_tokens=2)).done:
            assert told.error in ("engine_restarting", "engine_starting", "engine_stopped"), told
            await asyncio.sleep(0.05)


async def test_killed_engine_fails_only_its_streams_and_drain_none(start_server: Start) -> None:
    with start_server("--check-integrity") as server:
        async with client(server) as http:
            before = await read(http, max_tokens=5)
            assert before.done and before.finish_reason == "length"
            pid = server.engine_pid()
            streams = await under_load(http, 24, max_tokens=1000)
            os.kill(pid, signal.SIGKILL)
            told = await asyncio.gather(*streams)
            assert all(map(failed_in_order, told)), told
            await served_again(http)
            assert server.engine_pid() != pid
            server.assert_nothing_is_left()

            streams = await under_load(http, 24, max_tokens=120)
            server.child.send_signal(signal.SIGTERM)
            told = await asyncio.gather(*streams)
            assert all(one.done and one.finish_reason == "length" and not one.broken for one in told), told
            assert await asyncio.to_thread(server.child.wait, 60) == 0


async def test_stopped_engine_is_replaced_and_exits_with_the_server(start_server: Start) -> None:
    with start_server("--engine-hang-timeout", "2s", fake={"step_seconds": 0.01}) as server:
        async with client(server) as http:
            pid = server.engine_pid()
            streams = await under_load(http, 8, max_tokens=3000)
            os.kill(pid, signal.SIGSTOP)
            server.until_status("/readyz", 503, seconds=30)
            assert server.http.get("/livez").status_code == 200
            assert all(map(failed_in_order, await asyncio.gather(*streams)))
            await served_again(http)
            replaced = server.engine_pid()
            assert replaced != pid and not Path(f"/proc/{pid}").exists()

            streams = await under_load(http, 8, max_tokens=3000)
            server.child.kill()
            told = await asyncio.gather(*streams)
            assert all(one.broken and not one.done and one.finish_reason is None for one in told), told
        server.until(lambda: not Path(f"/proc/{replaced}").exists(), seconds=60)


async def test_vanished_clients_of_streams_free_every_block(start_server: Start) -> None:
    chance = random.Random(3)
    with start_server("--check-integrity", "--max-num-seqs", "128", fake={"step_seconds": 0.002}) as server:
        pid = server.engine_pid()
        async with client(server) as http:

            async def come(leaves_after: float | None) -> bool:
                reading = read(http, prompt=f"The list {chance.random()}", max_tokens=3000 if leaves_after else 40)
                try:
                    return (await asyncio.wait_for(reading, leaves_after)).done
                except TimeoutError:
                    return False

            stays = [chance.random() < 0.5 for _ in range(200)]
            outcomes = await asyncio.gather(*(come(None if stay else chance.uniform(0.01, 1.0)) for stay in stays))
        assert outcomes == stays
        server.assert_nothing_is_left()
        assert server.metric("vllm:request_success_total", finished_reason="length") == sum(stays)
        assert server.engine_pid() == pid
