"""Answers pass through as they arrive; when either side leaves, the other notices."""

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from quire_gateway import attempt

EVENT = {"Content-Type": "text/event-stream"}


def event(number: int) -> bytes:
    return b'data: {"n": %d}\n\n' % number


async def test_each_chunk_is_forwarded_before_the_next(gateway, chat):
    received = [asyncio.Event() for _ in range(3)]

    async def stream(request):
        response = web.StreamResponse(headers=EVENT)
        await response.prepare(request)
        for number in range(3):
            await response.write(event(number))
            await received[number].wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    chat.behaviour = stream

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        for number in range(3):
            async with asyncio.timeout(60):
                assert await response.content.readuntil(b"\n\n") == event(number)
            received[number].set()
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_first_bytes_of_an_unfinished_response_are_forwarded(gateway, chat):
    received = asyncio.Event()

    async def stream(request):
        response = web.StreamResponse(headers={"Content-Type": "audio/wav"})
        await response.prepare(request)
        await response.write(b"part")
        await received.wait()
        return response

    chat.behaviour = stream

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        assert await response.content.readany() == b"part"
        received.set()
        assert await response.content.read() == b""


@pytest.mark.parametrize("streaming", [True, False], ids=["mid-stream", "before the first byte"])
async def test_client_disconnect_cancels_at_the_replica_at_once(gateway, chat, streaming):
    async def stream(request):
        if streaming:
            response = web.StreamResponse(headers=EVENT)
            await response.prepare(request)
            await response.write(event(0))
        await asyncio.Event().wait()

    chat.behaviour = stream

    async with aiohttp.ClientSession() as client:
        call = asyncio.create_task(client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True}))
        await chat.arrived.wait()
        if streaming:
            response = await call
            await response.content.readany()
            response.close()
        else:
            call.cancel()
            await asyncio.wait([call])

    async with asyncio.timeout(60):
        await chat.left.wait()
    assert await gateway.metric("quire_gateway_client_disconnects_total", model="chat") == 1
    assert await gateway.metric("quire_gateway_requests_in_flight", model="chat") == 0


async def test_replica_crash_ends_the_stream_with_an_error(gateway, chat):
    chat.break_after(event(0) + b'data: {"half an ev')

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True}) as response:
        text = (await response.read()).decode()

    first, error, end = text.split("\n\n")
    assert (first, end) == ('data: {"n": 0}', "")
    kind, data = error.split("\n")
    assert kind == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["code"] == "replica_failed"
    assert response.headers["X-Quire-Replica"] == "chat-0"
    assert response.headers.get("Connection") is None and "[DONE]" not in text
    assert await gateway.metric("quire_gateway_broken_streams_total", model="chat", backend="chat-0") == 1


async def test_error_of_a_replica_in_its_stream_is_passed_on(gateway, chat):
    said = b'event: error\ndata: {"error": {"code": "engine_stopped"}}\n\n'
    chat.break_after(event(0) + said)

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", "stream": True}) as response:
        assert await response.read() == event(0) + said
    assert await gateway.metric("quire_gateway_broken_streams_total", model="chat", backend="chat-0") == 1


async def test_broken_answer_without_events_is_not_ended_properly(gateway, chat):
    chat.break_after(b"half", "audio/wav")

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_slow_reader_applies_backpressure_to_the_replica(gateway, chat):
    sent = 0
    chunk = event(0) * 4096
    stalled = asyncio.Event()

    async def flood(request):
        nonlocal sent
        response = web.StreamResponse(headers=EVENT)
        await response.prepare(request)
        while True:
            try:
                async with asyncio.timeout(0.5):
                    await response.write(chunk)
            except TimeoutError:
                stalled.set()
                raise ConnectionResetError from None
            sent += len(chunk)

    chat.behaviour = flood

    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port, limit=1024)
    body = b'{"model": "chat"}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    async with asyncio.timeout(120):
        await stalled.wait()
    writer.close()
    # The capacity of the kernel's socket buffers on two connections, and no more.
    assert sent < 32 * 2**20


@pytest.mark.parametrize(("per_second", "takes_seconds"), [(10**9, 10.0), (10**6, 40.0)], ids=["flood", "answer"])
async def test_stream_is_relayed_at_a_bounded_rate(monkeypatch, per_second: int, takes_seconds: float):
    """40 MiB in chunks of 64 KiB, from a replica that sends so many bytes in a second."""
    clock = [0.0]

    async def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(attempt, "monotonic", lambda: clock[0])
    monkeypatch.setattr(attempt.asyncio, "sleep", sleep)
    pace = attempt._Pace()
    for _ in range(640):
        clock[0] += 2**16 / per_second
        await pace.wait(2**16)
    assert clock[0] == pytest.approx(takes_seconds, rel=0.06)
