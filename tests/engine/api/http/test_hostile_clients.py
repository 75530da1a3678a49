"""Limits on what one client can do to others and to readers of the log with small requests."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.datastructures import Headers

from quire_common.logs import log_handler
from quire_engine.api import http_server, stream
from quire_engine.api.auth import ANONYMOUS, Access
from quire_engine.config import AccessOptions
from quire_engine.errors import Forbidden

Serving = Callable[..., Any]


# --- the log ---


@pytest.mark.parametrize("format", ["text", "json"])
async def test_client_data_cannot_start_a_log_line(
    serving: Serving, caplog: pytest.LogCaptureFixture, format: Any
) -> None:
    forged = "12:00:00.000 error   the engine has failed"
    async with serving("ok", log_requests=True, lenient=True) as server:
        with caplog.at_level(logging.INFO, logger="quire_engine"):
            await server.http.get(f"/x%0A{forged}%0D%1B[2J%C2%85%E2%80%A8")
            await server.complete(**{f"y\n{forged}": 1})
    records = [record for record in caplog.records if forged in record.getMessage()]
    assert len(records) == 2
    for record in records:
        line = log_handler(format).format(record)
        assert len(line.splitlines()) == 1 and forged in line
        assert not {"\r", "\x1b", "\x85", "\u2028"} & set(line)


async def test_long_path_is_cut_in_the_log(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    async with serving("ok", log_requests=True) as server:
        with caplog.at_level(logging.INFO, logger="quire_engine"):
            await server.http.get("/x" * 10_000)
    assert max(len(record.getMessage()) for record in caplog.records) < 300


# --- /admin without a key ---


@pytest.mark.parametrize("header", ["x-forwarded-for", "forwarded", "x-real-ip"])
@pytest.mark.parametrize("local", [False, True], ids=["address", "unix socket"])
def test_proxied_request_is_not_treated_as_localhost(header: str, local: bool) -> None:
    access = Access(AccessOptions(), lambda: 0.0, local=local)
    host = None if local else "127.0.0.1"
    assert access.check("/admin/drain", Headers({}), host) == ANONYMOUS
    with pytest.raises(Forbidden):
        access.check("/admin/drain", Headers({header: "127.0.0.1"}), host)


def test_ipv4_mapped_loopback_counts_as_localhost() -> None:
    access = Access(AccessOptions(), lambda: 0.0)
    assert access.check("/admin/drain", Headers({}), "::ffff:127.0.0.1") == ANONYMOUS
    with pytest.raises(Forbidden):
        access.check("/admin/drain", Headers({}), "::ffff:10.0.0.9")


# --- answers much larger than their requests ---


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
async def test_prompt_logprobs_count_for_each_answer_that_reports_them(
    serving: Serving, fields: dict[str, Any]
) -> None:
    async with serving("ok") as server:
        assert (await server.complete(prompt="x" * 100, n=2, max_tokens=1, **fields)).status_code == 200
        refused = await server.complete(prompt="x" * 100, n=128, max_tokens=1, **fields)
        assert refused.status_code == 400 and " 268800 " in refused.json()["error"]["message"]
        assert len(server.engine.streams) == 2


async def test_logprobs_of_an_unstreamed_response_are_bounded(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_LOGPROBS_HELD", 100)
    async with serving("some words", max_logprobs=20) as server:
        assert (await server.complete(logprobs=5)).status_code == 200
        assert (await server.complete(logprobs=5, n=4, stream=True)).text.endswith("data: [DONE]\n\n")
        refused = await server.complete(logprobs=5, n=4)
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "answer_too_large"
        assert server.context.lifecycle.in_flight == 0


async def test_template_kwargs_may_not_override_reserved_names(serving: Serving) -> None:
    async with serving("ok") as server:
        for path, more in (("/tokenize", {}), ("/v1/chat/completions", {"model": "demo"})):
            body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"messages": []}, **more}
            refused = await server.http.post(path, json=body)
            assert refused.status_code == 400 and "may not set messages" in refused.json()["error"]["message"]


# --- connections ---


async def test_unread_response_is_dropped_after_a_timeout(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_SECONDS", 0.2)
    async with serving("ok") as server:
        server.engine.ready = msgspec.structs.replace(server.engine.ready, max_model_len=1_500_000)
        body = json.dumps({"tokens": [256] * 1_500_000}).encode()
        head = b"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        host, _, port = server.address.removeprefix("http://").partition(":")
        loop = asyncio.get_running_loop()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, head + b"content-length: %d\r\n\r\n%b" % (len(body), body))
            received = await loop.sock_recv(connection, 100)
            assert received.startswith(b"HTTP/1.1 200 ")
            await asyncio.sleep(1.0)  # it must not read
            total = 0
            async with asyncio.timeout(60):
                while more := await loop.sock_recv(connection, 2**20):
                    total += len(more)
            assert total < 10_000_000  # <|eos|> has seven characters


@pytest.mark.parametrize("cut", range(1, 12))
async def test_an_upgrade_offer_is_ignored_however_it_is_split(serving: Serving, cut: int) -> None:
    body = b'{"model": "demo", "prompt": "Hi"}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, close\r\ncontent-type: application/json"
    rest = b"\r\nUpgrade: h2c\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with serving("ok") as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in (head + rest[:cut], rest[cut:]):
            writer.write(part)
            await asyncio.sleep(0.02)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
        assert answer.startswith(b"HTTP/1.1 200 ") and b'"text":"ok"' in answer
