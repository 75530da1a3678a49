"""Before the first byte a request may go to another replica; after it, never."""

import asyncio
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import aiohttp
import pytest
from aiohttp import web

from quire_common.contract.gateway import Endpoint
from quire_gateway.__main__ import _socket

GONE = Endpoint(id="gone", url="http://127.0.0.1:1", ready=True, serving=True, terminating=False)


def answering(status: int, **headers: str):
    async def answer(request):
        return web.json_response({"error": {"message": "no"}}, status=status, headers=headers)

    return answer


async def hang_up(request):
    # Later than a connection that was closed while idle would be noticed.
    await asyncio.sleep(0.06)
    request.transport.abort()
    return web.Response()


async def die_in_the_body(request):
    response = web.StreamResponse(headers={"Content-Length": "100", "Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"half')
    await asyncio.sleep(0)
    request.transport.abort()
    return response


async def test_replica_that_refuses_connections_is_skipped(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[GONE, chat.endpoint()])

    for _ in range(4):
        status, body = await gateway.complete()
        assert (status, body["served_by"]) == (200, "chat-0")

    # Once is enough: for a while other replicas are preferred.
    assert await gateway.metric("quire_gateway_retries_total", reason="unreachable") <= 1


@pytest.fixture
def vanished() -> Iterator[Callable[[str], Endpoint]]:
    """Yield addresses that do not even answer connection attempts, because their accept queue is full."""
    with ExitStack() as stack:

        def make(name: str) -> Endpoint:
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(0)
            for _ in range(4):
                client = stack.enter_context(socket.socket())
                client.setblocking(False)
                with suppress(BlockingIOError):
                    client.connect(listener.getsockname())
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return Endpoint(id=name, url=url, ready=True, serving=True, terminating=False)

        yield make


async def test_request_is_retried_if_the_machine_of_a_replica_vanished(gateway, replicas, vanished, monkeypatch):
    # Otherwise each would take five seconds.
    session = gateway.gateway.proxy._attempts._session
    monkeypatch.setattr(session, "_timeout", aiohttp.ClientTimeout(total=None, sock_connect=0.2))
    good = await replicas("good")
    good.load |= {"running": 50}
    gone = [vanished("gone-0"), vanished("gone-1")]
    await gateway.push(chat=gone)
    answer = asyncio.create_task(gateway.complete())
    await asyncio.sleep(0.1)
    await gateway.push(chat=[*gone, good.endpoint()])

    status, body = await answer

    assert (status, body.get("served_by")) == (200, "good")
    assert await gateway.metric("quire_gateway_retries_total", reason="disconnected") == 0
    assert await gateway.metric("quire_gateway_retries_total", reason="unreachable") >= 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names for it")
def test_unconfirmed_bytes_are_resent_for_a_bounded_time():
    with _socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1))) as sock:
        idle, every, count, unconfirmed = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
        )

    assert unconfirmed == 1000 * (idle + every * count) == 30_000


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (answering(503), "unavailable"),
        (answering(429), "busy"),
        (hang_up, "disconnected"),
        (die_in_the_body, "disconnected"),
    ],
    ids=["draining", "full", "hangs up", "dies in the body"],
)
async def test_replica_that_does_not_answer_is_replaced_by_another(gateway, replicas, behaviour, reason):
    bad, good = await replicas("bad"), await replicas("good")
    bad.behaviour = behaviour
    good.load |= {"running": 50}
    await gateway.push_and_scrape(chat=[bad.endpoint(), good.endpoint()])

    status, body = await gateway.complete()

    assert (status, body["served_by"]) == (200, "good")
    assert len(bad.bodies) == 1
    assert bad.bodies == good.bodies
    assert await gateway.metric("quire_gateway_retries_total", reason=reason) == 1


@pytest.mark.parametrize("status", [400, 401, 404, 422, 500, 501])
async def test_other_errors_are_relayed(gateway, replicas, status):
    one, two = await replicas("one"), await replicas("two")
    one.behaviour = two.behaviour = answering(status)
    await gateway.push(chat=[one.endpoint(), two.endpoint()])

    assert (await gateway.complete())[0] == status
    assert len(one.bodies) + len(two.bodies) == 1


async def test_busy_on_all_replicas_is_429_with_retry_after(gateway, replicas):
    one, two = await replicas("one"), await replicas("two")
    one.behaviour = two.behaviour = answering(429, **{"Retry-After": "7"})
    await gateway.push(chat=[one.endpoint(), two.endpoint()])

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "7")
        assert (await response.json())["error"]["message"] == "no"
    assert len(one.bodies) == len(two.bodies) == 1


def refusing(code: str):
    async def answer(request):
        return web.json_response({"error": {"message": "no", "code": code}}, status=503)

    return answer


KILLED = [hang_up, die_in_the_body, refusing("engine_stopped")]
KILLED_IDS = ["replica hangs up", "replica dies in the body", "engine process died"]


@pytest.mark.parametrize("behaviour", KILLED, ids=KILLED_IDS)
async def test_request_that_kills_replicas_is_not_sent_to_a_third(gateway, replicas, behaviour):
    fleet = [await replicas(name) for name in "abcd"]
    for replica in fleet:
        replica.behaviour = behaviour
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        body = await response.json()

    assert (response.status, body["error"]["code"]) == (502, "replica_failed")
    assert response.headers["x-should-retry"] == "false"
    assert sum(len(replica.bodies) for replica in fleet) == 2


async def test_request_that_never_started_waits_for_the_engine(gateway, chat):
    chat.behaviour = refusing("engine_restarting")
    call = asyncio.create_task(gateway.complete())
    await gateway.until_held(1)

    chat.behaviour = chat.say_name

    assert (await call)[0] == 200


@pytest.mark.parametrize("text", [b"", b"null", b'{"error": "engine_stopped"}', b"[" * 10_000, b"\xff"])
async def test_unavailable_answer_of_another_shape_is_tried_elsewhere(gateway, replicas, text):
    bad, good = await replicas("bad"), await replicas("good")
    good.load |= {"running": 50}

    async def answer(request):
        return web.Response(status=503, body=text)

    bad.behaviour = answer
    await gateway.push_and_scrape(chat=[bad.endpoint(), good.endpoint()])

    assert (await gateway.complete())[1]["served_by"] == "good"


async def test_idle_connection_close_loses_no_request(gateway, chat):
    assert (await gateway.complete())[0] == 200

    # The restarted replica knows nothing of the gateway's pooled connections.
    await chat.stop()
    await chat.start()

    assert (await gateway.complete())[0] == 200


async def test_dropped_idle_connection_is_retried_at_once(start_gateway):
    gateway = await start_gateway(hold_limit=0)
    requests: list[int] = []

    class DropsTheSecond(asyncio.Protocol):
        """A protocol that answers one request per connection and closes it at the next."""

        def connection_made(self, transport):
            self.transport, self.answered = transport, False

        def data_received(self, data):
            if data.startswith(b"GET"):
                self.transport.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                self.transport.close()
            elif not data.rstrip().endswith(b"}"):
                pass
            elif self.answered:
                self.transport.close()
            else:
                self.answered = True
                requests.append(1)
                self.transport.write(
                    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"
                )

    server = await asyncio.get_running_loop().create_server(DropsTheSecond, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await gateway.push(chat=[Endpoint(id="chat-0", url=url, ready=True, serving=True, terminating=False)])

    # Without room in the hold queue, anything but an immediate answer would be an error.
    for _ in range(5):
        assert (await gateway.complete())[0] == 200
    assert len(requests) == 5
    server.close()


async def test_replica_gone_after_it_closed_a_reused_connection_died(gateway):
    """Two such replicas make the request fail, though neither left a trace on a new connection."""
    servers: dict[str, asyncio.Server] = {}

    class DiesAtTheSecond(asyncio.Protocol):
        """A protocol that answers one request, and stops its server at the next on the same connection."""

        def __init__(self, name: str) -> None:
            self.name, self.answered = name, False

        def connection_made(self, transport):
            self.transport = transport

        def data_received(self, data):
            if data.startswith(b"GET") or not data.rstrip().endswith(b"}"):
                return
            if self.answered:
                servers[self.name].close()
                self.transport.close()
                return
            self.answered = True
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}")

    endpoints = []
    for name in ("one", "two"):
        server = await asyncio.get_running_loop().create_server(lambda name=name: DiesAtTheSecond(name), "127.0.0.1", 0)
        servers[name] = server
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        endpoints.append(Endpoint(id=name, url=url, ready=True, serving=True, terminating=False))
        await gateway.push(chat=[endpoints[-1]])
        assert (await gateway.complete())[0] == 200
    await gateway.push(chat=endpoints)

    status, body = await gateway.complete()

    assert (status, body["error"]["code"]) == (502, "replica_failed")
    assert not any(server.is_serving() for server in servers.values())


async def test_attempts_per_request_are_limited(start_gateway, replicas):
    gateway = await start_gateway(max_attempts=2)
    fleet = [await replicas(name) for name in "abcd"]
    for replica in fleet:
        replica.behaviour = answering(429)
    await gateway.push(chat=[replica.endpoint() for replica in fleet])

    assert (await gateway.complete())[0] == 429
    assert sum(len(replica.bodies) for replica in fleet) == 2


async def test_terminating_and_unready_replicas_get_no_requests(gateway, replicas):
    leaving, loading, chat = await replicas("leaving"), await replicas("loading"), await replicas("chat-0")
    await gateway.push(chat=[leaving.endpoint(terminating=True), loading.endpoint(ready=False), chat.endpoint()])

    answers = [await gateway.complete() for _ in range(6)]

    assert {body["served_by"] for _, body in answers} == {"chat-0"}
