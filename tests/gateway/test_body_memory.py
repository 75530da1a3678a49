"""The bodies of all requests in progress share one memory budget, and each is freed once no retry can follow."""

import asyncio
import gzip
import io
import json
import re
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from quire_gateway.__main__ import main
from quire_gateway.bodies import Body, BodyMemory

MIB = 2**20
CHART_LIMIT_MIB = 256


def body_of(size: int, model: str = "chat") -> bytes:
    return json.dumps({"model": model, "prompt": "x" * size}).encode()


async def post(gateway, size: int) -> tuple[int, str | None, str | None]:
    """Return status, the error's code, and Retry-After."""
    async with gateway.client.post(f"{gateway.url}/v1/completions", data=body_of(size)) as response:
        error = (await response.json()).get("error", {})
        return response.status, error.get("code"), response.headers.get("Retry-After")


class Paused:
    """A replica that streams its first byte at once and the rest on a signal."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: "first"\n\n')
        await self.go_on.wait()
        await response.write(b"data: [DONE]\n\n")
        return response


async def test_body_that_does_not_fit_gets_503_and_retry_after(start_gateway):
    gateway = await start_gateway(max_body_bytes=MIB, body_memory_bytes=MIB)
    await gateway.push(chat=[])
    held = asyncio.create_task(post(gateway, MIB // 2))
    await gateway.until_held(1)
    assert await gateway.metric("quire_gateway_body_bytes") >= MIB // 2

    assert await post(gateway, MIB // 2) == (503, "body_memory_full", "2")

    held.cancel()
    while gateway.gateway.body_memory.used_bytes:
        await asyncio.sleep(0.005)


async def test_body_is_freed_when_its_stream_begins(start_gateway, replicas):
    gateway = await start_gateway(max_body_bytes=MIB, body_memory_bytes=MIB)
    chat, paused = await replicas("chat-0"), Paused()
    chat.behaviour = paused
    await gateway.push(chat=[chat.endpoint()])
    async with gateway.client.post(f"{gateway.url}/v1/completions", data=body_of(MIB // 2)) as response:
        assert await response.content.readany() == b'data: "first"\n\n'
        assert gateway.gateway.body_memory.used_bytes == 0
        paused.go_on.set()
        assert await response.content.read() == b"data: [DONE]\n\n"
    assert len(chat.bodies[0]["prompt"]) == MIB // 2


async def test_body_is_kept_for_the_next_replica_and_then_freed(start_gateway, replicas):
    gateway = await start_gateway(max_body_bytes=MIB, body_memory_bytes=MIB)
    fleet = [await replicas("bad"), await replicas("good")]

    fleet[0].refuse(429)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])
    for _ in range(4):
        assert (await post(gateway, MIB // 2))[0] == 200
    assert {len(body["prompt"]) for replica in fleet for body in replica.bodies} == {MIB // 2}
    assert gateway.gateway.body_memory.used_bytes == 0


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
async def test_body_without_a_length_is_charged_as_it_arrives(start_gateway, encoding):
    """Compressed bodies count with their decompressed size."""
    gateway = await start_gateway(max_body_bytes=2 * MIB, body_memory_bytes=2 * MIB)
    await gateway.push(chat=[])
    gateway.gateway.body_memory.reserve(3 * MIB // 2, owner="another")

    data = body_of(MIB)
    headers = {}
    if encoding == "gzip":
        data, headers = gzip.compress(data), {"Content-Encoding": "gzip"}

    async def pieces():
        for start in range(0, len(data), 2**16):
            yield data[start : start + 2**16]

    async with gateway.client.post(f"{gateway.url}/v1/completions", data=pieces(), headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (503, "body_memory_full")
    assert gateway.gateway.body_memory.used_bytes == 3 * MIB // 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40)), max_size=60))
def test_newcomer_always_has_room_for_a_body(sizes: list[tuple[str, int]]):
    """However much others send at the same time, and in whichever order, they leave a share for one more owner."""
    memory = BodyMemory(1000)
    bodies = []
    for owner, size in sizes:
        body = Body(memory, owner)
        if body.keep(size):
            bodies.append(body)
    # Each of the three takes at most half of what the others leave, or one body.
    assert 1000 - memory.used_bytes >= 1000 // 2**3 - 40
    assert Body(memory, "newcomer").keep(40)
    for body in bodies:
        body.release()
    assert memory.used_bytes == 40


def test_requests_without_keys_share_the_memory_in_order_of_arrival():
    """Behind a load balancer they all have one address."""
    memory = BodyMemory(1000)
    assert all(Body(memory, None).keep(100) for _ in range(10))
    assert not Body(memory, None).keep(1)


async def upload(gateway, size: int, *, sends: int, key: str) -> asyncio.StreamWriter:
    """Announce a body of a size and send a part of it, then nothing."""
    _, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: {size}\r\n\r\n"
    writer.write(head.encode() + b"x" * sends)
    await writer.drain()
    return writer


async def test_slow_uploads_of_one_key_leave_room_for_others(start_gateway, replicas, tmp_path: Path):
    (tmp_path / "keys").write_text("name=slow key-of-slow\nname=other key-of-other\n")
    gateway = await start_gateway(max_body_bytes=MIB, body_memory_bytes=6 * MIB, api_key_file=tmp_path / "keys")
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])
    uploads = [await upload(gateway, MIB, sends=MIB - 1, key="key-of-slow") for _ in range(8)]
    memory = gateway.gateway.body_memory
    while memory.used_bytes < 2.9 * MIB:
        await asyncio.sleep(0.005)
    headers = {"Authorization": "Bearer key-of-other"}
    async with gateway.client.post(
        f"{gateway.url}/v1/completions", data=body_of(MIB * 3 // 4), headers=headers
    ) as response:
        assert response.status == 200
    for writer in uploads:
        writer.close()


async def test_stalled_upload_is_refused(start_gateway, monkeypatch):
    monkeypatch.setattr("quire_gateway.bodies._STALLED_SECONDS", 0.1)
    gateway = await start_gateway()
    await gateway.push(chat=[])

    async def stalls():
        yield b'{"model": '
        await asyncio.Event().wait()

    async with gateway.client.post(f"{gateway.url}/v1/completions", data=stalls()) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (408, "request_timeout")
    assert gateway.gateway.body_memory.used_bytes == 0


def test_budget_below_the_largest_body_is_refused(capsys):
    assert main(["--kubernetes", "--body-memory", "1MiB", "--max-body-bytes", "2MiB"]) == 2
    assert "--body-memory must be at least --max-body-bytes" in capsys.readouterr().err


@pytest.mark.slow
async def test_many_large_bodies_stay_within_the_memory_limit(replicas, tmp_path: Path):
    """40 clients send 15 MiB each at the same time and read slow streams; the gateway is a separate process."""
    chat, paused = await replicas("chat-0"), Paused()
    chat.behaviour = paused
    endpoints = {"models": [{"name": "chat", "endpoints": [{"id": "chat-0", "url": chat.url, "ready": True}]}]}
    (tmp_path / "endpoints").write_text(json.dumps(endpoints))
    command = ["-m", "quire_gateway", "--host", "127.0.0.1", "--port", "0"]
    command += ["--endpoints-file", str(tmp_path / "endpoints")]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=PIPE)
    assert process.stderr is not None
    log = ""
    while "ready replicas: chat 1" not in log or "listening on" not in log:
        log += (await process.stderr.readline()).decode()
    port = re.search(r"listening on http://127.0.0.1:(\d+)", log)
    assert port is not None, log
    whole = body_of(15 * MIB)

    def resident_mib(line: str) -> int:
        status = Path(f"/proc/{process.pid}/status").read_text()
        return int(status.split(f"{line}:")[1].split()[0]) // 1024

    idle = resident_mib("VmRSS")

    async def one(client: aiohttp.ClientSession) -> tuple[int, bool]:
        """Return the status, and True if the stream is complete or the rejection has Retry-After."""
        async with client.post(f"http://127.0.0.1:{port[1]}/v1/completions", data=io.BytesIO(whole)) as response:
            text = await response.read()
            ended = text.endswith(b"data: [DONE]\n\n") if response.status == 200 else "Retry-After" in response.headers
            return response.status, ended

    try:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as client:
            calls = [asyncio.create_task(one(client)) for _ in range(40)]
            refused = 0
            # Streams end only when each other request has its answer.
            while len(chat.bodies) + refused < len(calls):
                await asyncio.sleep(0.05)
                refused = sum(call.done() for call in calls)
            streaming = resident_mib("VmRSS")
            paused.go_on.set()
            answers = await asyncio.gather(*calls)
    finally:
        peak = resident_mib("VmHWM")
        process.terminate()
        await process.communicate()
    served = sum(status == 200 for status, _ in answers)
    print(f"idle {idle} MiB, peak {peak} MiB, {len(chat.bodies)} streams {streaming} MiB; {served} of 40 served")
    assert peak < CHART_LIMIT_MIB
    assert {status for status, _ in answers} <= {200, 429, 503} and all(ended for _, ended in answers)
    assert served > 0
