"""SIGTERM: not ready at once, requests in progress finish, and those that cannot finish in time end with an error."""

import asyncio
import json
import os
import signal
import subprocess
import sys

import aiohttp
import pytest
from aiohttp import web

from quire_common.contract.gateway import WAIT_COMMENTS_HEADER
from quire_gateway import event_stream
from quire_gateway.__main__ import _CANCEL_SECONDS

EVENT = {"Content-Type": "text/event-stream"}


def streaming(gate: asyncio.Event):
    async def stream(request):
        response = web.StreamResponse(headers=EVENT)
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    return stream


async def test_stream_is_finished_before_the_gateway_stops(gateway, replicas):
    chat, gate = await replicas("chat-0"), asyncio.Event()
    chat.behaviour = streaming(gate)
    await gateway.push(chat=[chat.endpoint()])
    response = await gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True})
    await response.content.readuntil(b"\n\n")

    stopping = asyncio.create_task(gateway.gateway.stop())
    await asyncio.sleep(0)
    with pytest.raises(aiohttp.ClientConnectorError):
        async with aiohttp.ClientSession() as stranger:
            await stranger.get(f"{gateway.url}/livez")
    assert not stopping.done()
    gate.set()

    assert await response.content.read() == b"data: [DONE]\n\n"
    await stopping


async def test_open_connections_are_answered_and_closed_while_draining(gateway, replicas):
    chat, gate = await replicas("chat-0"), asyncio.Event()
    chat.behaviour = streaming(gate)
    await gateway.push(chat=[chat.endpoint()])
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b" 200 " in await reader.readuntil(b"\r\n\r\nok\n")
    running = await gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True})

    stopping = asyncio.create_task(gateway.gateway.stop())
    await asyncio.sleep(0)
    writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\n\r\n")
    answer = await reader.read()

    assert b" 503 " in answer and b"Connection: close" in answer
    writer.close()
    gate.set()
    await running.read()
    await stopping


async def test_unfinished_upload_is_answered_before_the_gateway_stops(gateway, chat):
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n{"model"')
    while not gateway.gateway.proxy.running:
        await asyncio.sleep(0.005)

    stopping = asyncio.create_task(gateway.gateway.stop())
    # This is longer than the limit of idle connections.
    await asyncio.sleep(_CANCEL_SECONDS + 0.5)
    assert not stopping.done()
    writer.write(b': "chat"}')
    answer = await reader.read()
    writer.close()
    await stopping

    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"Connection: close" in answer


async def test_stream_unfinished_at_the_drain_timeout_gets_an_error(start_gateway, replicas):
    gateway = await start_gateway(drain_timeout_seconds=0.05)
    chat = await replicas("chat-0")
    chat.behaviour = streaming(asyncio.Event())
    await gateway.push(chat=[chat.endpoint()], empty=[])
    response = await gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True})
    await response.content.readuntil(b"\n\n")
    held = asyncio.create_task(gateway.complete("empty"))
    await gateway.until_held(1, "empty")

    await gateway.gateway.stop()

    event = (await response.content.read()).decode()
    assert json.loads(event.split("data: ")[1])["error"]["code"] == "shutting_down"
    assert "[DONE]" not in event
    status, body = await held
    assert (status, body["error"]["code"]) == (503, "shutting_down")
    await asyncio.wait_for(chat.left.wait(), 60)


async def test_commented_stream_at_the_drain_timeout_gets_an_error(start_gateway, monkeypatch):
    """The response of a held stream has started with a comment, so a second head would corrupt its body."""
    monkeypatch.setattr(event_stream, "_LEAST_SECONDS", 0.01)
    gateway = await start_gateway(drain_timeout_seconds=0.05)
    await gateway.push(chat=[])
    body, wish = {"model": "chat", "stream": True}, {WAIT_COMMENTS_HEADER: "0.01"}
    response = await gateway.client.post(f"{gateway.url}/v1/completions", json=body, headers=wish)
    await response.content.readuntil(b"\n\n")

    await gateway.gateway.stop()

    *comments, event, end = (await response.content.read()).decode().split("\n\n")
    assert set(comments) <= {": waiting for a replica"} and event.startswith("event: error\ndata: ") and end == ""
    assert json.loads(event.split("data: ")[1])["error"]["code"] == "shutting_down"


def test_command_serves_until_sigterm_and_exits_with_zero(tmp_path):
    endpoints = tmp_path / "endpoints.json"
    endpoints.write_text('{"models": [{"name": "chat", "endpoints": []}]}')
    command = [sys.executable, "-m", "quire_gateway", "--host", "127.0.0.1", "--port", "0"]
    command += ["--endpoints-file", str(endpoints)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        lines = (json.loads(line)["message"] for line in process.stderr)
        assert next(lines).startswith("listening on http://127.0.0.1:")
        assert next(lines) == "ready replicas: chat 0"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 0
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        process.stderr.close()
        process.wait()
