"""A request head has a deadline, and the number of connections is bounded."""

import asyncio
import contextlib
import json

import pytest

from quire_gateway import connections
from quire_gateway.connections import Connections

GET = b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n"


async def connect(gateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.port)


async def status(reader: asyncio.StreamReader) -> int:
    """Read one answer with a Content-Length."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    await reader.readexactly(int(head.partition("content-length: ")[2].split()[0]))
    return int(head.split()[1])


def hasten(monkeypatch, seconds: float) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", seconds)


async def until_cut(gateway) -> None:
    """Wait until a connection that opens now has reached its deadline, as those that opened before have."""
    reader, writer = await connect(gateway)
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_half_sent_head_is_cut_at_its_deadline(gateway, monkeypatch):
    hasten(monkeypatch, 0.05)
    for sent in (b"", b"GET /livez HT", GET[:-4] % b"/livez"):
        reader, writer = await connect(gateway)
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_half_sent_head_after_an_answer_is_cut(gateway, monkeypatch):
    hasten(monkeypatch, 0.2)
    reader, writer = await connect(gateway)
    writer.write(GET % b"/livez")
    assert await status(reader) == 200
    writer.write(b"GET /")
    with contextlib.suppress(ConnectionResetError):
        assert await reader.read() == b""
    writer.close()


async def test_head_deadline_does_not_cut_a_request(gateway, replicas, monkeypatch):
    hasten(monkeypatch, 0.2)
    chat, go_on = await replicas("chat-0"), asyncio.Event()
    chat.answer_after(go_on)
    await gateway.push(chat=[chat.endpoint()])
    call = asyncio.create_task(gateway.complete())
    await chat.arrived.wait()
    await until_cut(gateway)
    go_on.set()
    assert (await call)[0] == 200
    # An idle connection that answered requests before has no head deadline either.
    reader, writer = await connect(gateway)
    for _ in range(2):
        writer.write(GET % b"/livez")
        assert await status(reader) == 200
        await until_cut(gateway)
    writer.close()


async def test_longest_idle_connection_is_closed_first(start_gateway):
    gateway = await start_gateway(max_connections=3)
    opened = [await connect(gateway) for _ in range(3)]
    for reader, writer in reversed(opened):
        writer.write(GET % b"/livez")
        assert await status(reader) == 200

    reader, writer = await connect(gateway)
    writer.write(GET % b"/livez")

    assert await status(reader) == 200
    # The last one that was opened was answered first, so it has been idle the longest.
    alive = []
    for each, sender in opened:
        try:
            sender.write(GET % b"/livez")
            alive.append(await status(each) == 200)
        except (asyncio.IncompleteReadError, ConnectionResetError):
            alive.append(False)
        sender.close()
    assert alive == [True, True, False]
    writer.close()


async def test_probes_are_answered_when_all_connections_are_busy(start_gateway, replicas):
    gateway = await start_gateway(max_connections=2)
    chat, go_on = await replicas("chat-0"), asyncio.Event()
    chat.answer_after(go_on)
    await gateway.push(chat=[chat.endpoint()])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(2)]
    while len(chat.bodies) < 2:
        await asyncio.sleep(0.005)

    assert (await gateway.complete())[1]["error"]["code"] == "too_many_connections"
    async with gateway.client.get(f"{gateway.url}/livez") as response:
        assert (response.status, response.headers["Connection"]) == (200, "close")
    go_on.set()
    assert [code for code, _ in await asyncio.gather(*calls)] == [200, 200]
    assert (await gateway.complete())[0] == 200


def test_surplus_connections_are_bounded():
    class Fake:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    connections = Connections(None, limit=1)
    opened = [Fake() for _ in range(80)]
    for fake in opened:
        connections.opened(fake)
        connections.busy(fake)
    assert [fake.aborted for fake in opened] == [False] * 65 + [True] * 15


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        pytest.param(POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, id="two lengths"),
        pytest.param(POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", 400, id="length and chunks"),
        pytest.param(POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400, id="unknown encoding"),
        pytest.param(POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400, id="no size of a chunk"),
        pytest.param(POST + b"Expect: a miracle\r\nContent-Length: 2\r\n\r\n{}", 417, id="expectation"),
        pytest.param(POST + b"No Header: 1\r\n\r\n", 400, id="header"),
        pytest.param(b"GET /v1/models HTTP/1.1\r\n\r\n", 400, id="no host"),
        pytest.param(b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400, id="long path"),
        pytest.param(b"\x16\x03\x01\r\n\r\n", 400, id="TLS"),
    ],
)
async def test_invalid_http_gets_an_error_in_openais_shape(gateway, replicas, sent: bytes, status: int):
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    reader, writer = await connect(gateway)
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = json.loads(await reader.readexactly(int(head.partition("content-length: ")[2].split()[0])))
    writer.close()
    assert head.split()[1] == str(status) and "server: quire-gateway\r\n" in head and "x-request-id: " in head
    assert body["error"]["type"] == "invalid_request_error" and body["error"]["message"]
    assert replica.bodies == []


async def test_error_outside_of_the_application_is_an_internal_one(start_gateway, monkeypatch, caplog):
    """It is logged once, by the gateway."""

    async def fail(*_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("aiohttp.web_app.Application._handle", fail)
    gateway = await start_gateway()
    async with gateway.client.get(f"{gateway.url}/livez") as response:
        assert response.status == 500 and response.headers["Server"] == "quire-gateway"
        assert (await response.json())["error"]["type"] == "internal_error"
    assert [record.exc_info[1].args for record in caplog.records if record.exc_info] == [("a bug",)]
