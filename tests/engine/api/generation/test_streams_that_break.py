"""Clients that leave, engines that fail, servers that stop: correct reports, and nothing keeps running."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from quire_common.contract.engine import USAGE_COMMENT, USAGE_HEADER
from quire_engine.api import stream as streaming_answers
from quire_engine.config import AdmissionOptions
from quire_engine.errors import InvalidRequest, Unavailable

Serving = Callable[..., Any]
TokenIds = Callable[[str], list[int]]
STREAM = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@asynccontextmanager
async def streaming(server: Any, ids: list[int]) -> AsyncIterator[httpx.Response]:
    """Yield a stream that has started."""
    request = server.http.build_request("POST", "/v1/chat/completions", json=STREAM)
    asking = asyncio.create_task(server.http.send(request, stream=True))
    (await server.engine.stream()).draw(ids)
    response = await asking
    yield response
    await response.aclose()


async def read_until_broken(response: httpx.Response) -> str:
    """Return the text before the connection was closed without the body's end."""
    text = ""
    with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):
        async for part in response.aiter_text():
            text += part
    return text


async def test_engine_lost_in_a_stream_sends_an_error_without_done(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server, streaming(server, token_ids("Hel")) as response:
        server.engine.streams[0].breaks(Unavailable("the engine stopped", code="engine_stopped"))
        text = await read_until_broken(response)
        assert response.status_code == 200
        assert "[DONE]" not in text and '"finish_reason":"' not in text
        last = text.strip().split("\n\n")[-1]
        assert last.startswith("event: error\ndata: ")
        assert json.loads(last.partition("data: ")[2])["error"]["code"] == "engine_stopped"
        assert server.context.metrics.finished["error"] == 1
        assert server.queue.requests == 0 and server.context.lifecycle.in_flight == 0


async def test_openais_client_raises_when_a_stream_breaks(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        call = server.openai.chat.completions.create(model="demo", messages=STREAM["messages"], stream=True)
        asking = asyncio.create_task(call)
        stream = await server.engine.stream()
        stream.draw(token_ids("Hel"))
        chunks = await asking
        stream.breaks(Unavailable("the engine stopped"))
        with pytest.raises(openai.APIError, match="the engine stopped"):
            async for _ in chunks:
                pass


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [(InvalidRequest("needs 9 blocks, there are 8"), 400), (Unavailable("gone", retry_after_seconds=3), 503)],
)
async def test_failure_before_the_first_token_is_an_http_status(
    serving: Serving, streamed: bool, error: Any, status: int
) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat(stream=streamed))
        (await server.engine.stream()).breaks(error)
        response = await asking
        assert response.status_code == status and response.json()["error"]["message"] == error.message
        assert response.headers.get("retry-after") == ("3" if status == 503 else None)


async def test_a_failed_answer_without_stream_is_an_error(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat())
        stream = await server.engine.stream()
        stream.draw(token_ids("Hel"))
        stream.breaks(Unavailable("the engine stopped"))
        assert (await asking).status_code == 503


@pytest.mark.parametrize("tokens_first", [True, False])
async def test_disconnect_cancels_the_stream_in_the_engine(
    serving: Serving, token_ids: TokenIds, tokens_first: bool
) -> None:
    async with serving() as server:
        async with httpx.AsyncClient(base_url=server.address) as leaving:
            asking = asyncio.create_task(
                leaving.send(leaving.build_request("POST", "/v1/chat/completions", json=STREAM), stream=True)
            )
            stream = await server.engine.stream()
            if tokens_first:
                stream.draw(token_ids("Hel"))
                await asking
            else:
                asking.cancel()
        await asyncio.wait_for(stream.cancelled.wait(), 60)
        await _quiet(server)
        assert server.context.metrics.finished["abort"] == 1


async def test_a_disconnect_without_stream_ends_all_sequences(serving: Serving) -> None:
    async with serving() as server:
        body = {"model": "demo", "prompt": ["a", "b"], "n": 2}
        asking = asyncio.create_task(server.http.post("/v1/completions", json=body))
        await server.engine.stream(3)
        asking.cancel()
        for stream in server.engine.streams:
            await asyncio.wait_for(stream.cancelled.wait(), 60)
        await _quiet(server)
        assert server.context.metrics.finished["abort"] == 4


async def test_disconnect_without_stream_is_logged_with_status_499(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        async with serving(log_requests=True) as server:
            asking = asyncio.create_task(server.chat())
            stream = await server.engine.stream()
            asking.cancel()
            await asyncio.wait_for(stream.cancelled.wait(), 60)
            await _quiet(server)
    assert "/v1/chat/completions 499" in caplog.text
    assert not any(record.exc_info for record in caplog.records)


async def _quiet(server: Any) -> None:
    """Wait until nothing runs and nothing counts as waiting."""
    lifecycle = server.context.lifecycle
    lifecycle.begin_drain()
    await asyncio.wait_for(lifecycle.drained(), 60)
    assert server.queue.requests == 0 and server.queue.tokens == 0


async def test_failure_of_one_choice_cancels_the_others(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat(n=3))
        await server.engine.stream(2)
        first, second, third = server.engine.streams
        first.draw(token_ids("whole"), "length")
        second.breaks(Unavailable("the engine stopped"))
        assert (await asking).status_code == 503
        assert third.cancelled.is_set() and not first.cancelled.is_set()
        assert server.context.metrics.finished == {"stop": 0, "length": 1, "abort": 0, "error": 2}


async def test_full_queue_is_429_with_retry_after(serving: Serving, token_ids: TokenIds) -> None:
    async with serving(admission=AdmissionOptions(max_queued_requests=1)) as server:
        waiting = asyncio.create_task(server.chat())
        stream = await server.engine.stream()
        response = await server.chat()
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert server.context.metrics.rejected["queue_full"] == 1
        stream.starts()
        stream.draw(token_ids("ok"), "length")
        assert (await waiting).status_code == 200
        assert server.queue.requests == 0


async def test_request_queued_too_long_gets_503_queue_timeout(serving: Serving) -> None:
    async with serving(admission=AdmissionOptions(max_queue_seconds=0.05)) as server:
        response = await server.chat(stream=True)
        assert response.status_code == 503 and response.json()["error"]["code"] == "queue_timeout"
        assert server.engine.streams[0].cancelled.is_set()
        await _quiet(server)


@pytest.mark.parametrize("choices", [1, 2])
async def test_request_started_before_the_queue_timeout_continues(
    serving: Serving, token_ids: TokenIds, choices: int
) -> None:
    async with serving(admission=AdmissionOptions(max_queue_seconds=600)) as server:
        asking = asyncio.create_task(server.chat(n=choices))
        await server.engine.stream(choices - 1)
        streams = server.engine.streams
        streams[0].starts()
        while server.queue.requests >= choices:
            await asyncio.sleep(0.01)
        (generation,) = server.context.lifecycle._in_flight
        generation._fail_if_queued()  # the timeout
        for stream in streams:
            stream.draw(token_ids("ok"), "length")
        assert (await asking).status_code == 200


async def test_drain_finishes_running_requests_and_refuses_new_ones(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server:
        asking = asyncio.create_task(server.chat(stream=True))
        stream = await server.engine.stream()
        stream.draw(token_ids("Hel"))
        drained = await server.http.post("/admin/drain")
        assert drained.json() == {"status": "draining", "in_flight": 1}
        ready = await server.http.get("/readyz")
        assert ready.status_code == 503 and ready.json()["status"] == "draining"
        assert (await server.http.get("/livez")).status_code == 200
        refused = await server.chat()
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "draining"
        stream.draw(token_ids("lo"), "length")
        assert (await asking).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(server.context.lifecycle.drained(), 60)


async def test_stream_beyond_the_drain_timeout_gets_an_error(serving: Serving, token_ids: TokenIds) -> None:
    async with serving() as server, streaming(server, token_ids("Hel")) as response:
        server.context.lifecycle.begin_drain()
        server.context.lifecycle.fail_all(Unavailable("the server is stopping", code="shutting_down"))
        text = await read_until_broken(response)
        assert "shutting_down" in text and "[DONE]" not in text
        assert server.engine.streams[0].cancelled.is_set()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ("starting", "the engine is starting; try again shortly"),
        ("restarting", "the engine is being restarted; try again shortly"),
        ("failed", "the engine has failed"),
    ],
)
async def test_request_without_an_engine_gets_503_with_its_state(serving: Serving, state: str, message: str) -> None:
    async with serving(ready=False) as server:
        server.engine.state = state
        response = await server.chat()
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["message"]) == (503, f"engine_{state}", message)
        assert int(response.headers["retry-after"]) > 0


async def test_an_engine_lost_during_submission_releases_the_queue(serving: Serving) -> None:
    async with serving() as server:
        server.engine.refuses = Unavailable("the engine is being restarted", code="engine_restarting")
        response = await server.chat(n=2)
        assert response.status_code == 503 and response.json()["error"]["code"] == "engine_restarting"
        assert (server.queue.requests, server.queue.tokens) == (0, 0)
        assert server.context.metrics.arrived_requests == 0


async def test_a_bug_is_a_500_without_internals(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as server:
        server.engine.refuses = RuntimeError("secret detail")
        response = await server.chat()
        assert response.status_code == 500 and response.json()["error"]["type"] == "server_error"
        assert "secret" not in response.text and "secret detail" in caplog.text
        assert (await server.http.get("/livez")).status_code == 200
        assert (server.queue.requests, server.context.lifecycle.in_flight) == (0, 0)


async def test_internal_error_in_a_stream_is_an_error_event(
    serving: Serving, token_ids: TokenIds, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as server, streaming(server, token_ids("Hel")) as response:
        server.engine.streams[0].breaks(RuntimeError("secret detail"))
        text = await read_until_broken(response)
        assert '"type":"server_error"' in text and "secret" not in text and "secret detail" in caplog.text


async def test_client_that_reads_nothing_is_disconnected(
    serving: Serving, token_ids: TokenIds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_answers, "_SEND_TIMEOUT_SECONDS", 0.2)
    async with serving() as server:
        host, _, port = server.address.removeprefix("http://").partition(":")
        body = json.dumps(STREAM).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += b"content-length: %d\r\n\r\n" % len(body)
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, (host, int(port)))
            await loop.sock_sendall(connection, head + body)
            stream = await server.engine.stream()
            text = token_ids("x" * 20_000)
            while not stream.cancelled.is_set():
                stream.draw(text)
                await asyncio.sleep(0)
        assert (await asyncio.wait_for(server.http.get("/livez"), 60)).status_code == 200
        assert server.context.lifecycle.in_flight == 0


@pytest.mark.parametrize("asked", [False, True])
async def test_usage_comment_ends_a_stream_with_the_usage_header(
    serving: Serving, token_ids: TokenIds, asked: bool
) -> None:
    ids = token_ids("Hello")
    async with serving() as server:
        headers = {USAGE_HEADER: "1"} if asked else {}
        request = server.http.build_request("POST", "/v1/chat/completions", json=STREAM, headers=headers)
        asking = asyncio.create_task(server.http.send(request))
        (await server.engine.stream()).draw(ids, "length")
        text = (await asking).text
    assert text.endswith("data: [DONE]\n\n")
    comments = [part for part in text.encode().split(b"\n\n") if part.startswith(USAGE_COMMENT)]
    assert len(comments) == asked
    for comment in comments:
        usage = json.loads(comment.removeprefix(USAGE_COMMENT))
        assert usage["completion_tokens"] == len(ids)
        assert usage["total_tokens"] == usage["prompt_tokens"] + len(ids)
