"""Clients that send a byte now and then are disconnected and do not block others."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.api import body, http_server

Serving = Callable[..., Any]


async def trickle(address: str, head: bytes, drops: bytes) -> bytes:
    """Send the head, then its drops one by one until the server ends the connection; return the answer.

    It uses the bare socket, because a stream of asyncio loses what arrived before a reset.
    """
    loop = asyncio.get_running_loop()
    host, _, port = address.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.setblocking(False)
        answering = asyncio.create_task(received(connection))
        async with asyncio.timeout(20):
            try:
                await loop.sock_sendall(connection, head)
                while not answering.done():
                    await loop.sock_sendall(connection, drops)
                    await asyncio.sleep(0.02)
            except ConnectionError:
                pass  # it has ended the connection, but the answer may still be readable
            return await answering


async def received(connection: socket.socket) -> bytes:
    """Return what arrives until the connection ends."""
    answer = bytearray()
    try:
        while data := await asyncio.get_running_loop().sock_recv(connection, 65536):
            answer += data
    except ConnectionError:
        pass
    return bytes(answer)


@pytest.mark.parametrize("start", [b"", b"GET /v1/models HTTP/1.1\r\nx: "], ids=["silent", "endless header"])
async def test_unfinished_request_head_times_out(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    async with serving("ok") as server:
        given_up = asyncio.create_task(trickle(server.address, start, b"y" if start else b""))
        assert (await server.complete()).status_code == 200
        assert b"200 OK" not in await given_up


async def test_an_endless_head_on_a_used_connection_is_closed(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)
    async with serving("ok") as server:
        answer = await trickle(server.address, b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\nGET /livez HT", b"T")
        assert answer.count(b"200 OK") == 1


async def test_a_body_that_does_not_arrive_is_408(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_READ_SECONDS", 0.3)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    async with serving("ok") as server:
        answer = await trickle(server.address, head + b"content-length: 100000\r\n\r\n{", b" ")
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.3 s" in answer
        assert server.context.lifecycle.in_flight == 0


async def test_very_long_url_is_431(serving: Serving) -> None:
    async with serving("ok") as server:
        answer = await trickle(server.address, b"GET /v1/models?x=" + b"y" * 70_000, b"y")
        assert answer.startswith(b"HTTP/1.1 431 ") or answer == b""  # reset if it still sends after the answer
        assert (await server.http.get("/livez")).status_code == 200
