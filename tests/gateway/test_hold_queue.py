"""Requests wait for a replica: bounded in number and time."""

import asyncio
from time import monotonic

import openai
import pytest
from aiohttp import web

from quire_common.contract.gateway import WAIT_COMMENTS_HEADER, HoldPolicy
from quire_gateway import event_stream


async def test_request_at_zero_is_answered_by_the_first_replica(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[])

    calls = [asyncio.create_task(gateway.complete()) for _ in range(3)]
    await gateway.until_held(3)
    assert await gateway.metric("quire_gateway_held_requests", model="chat") == 3
    await gateway.push(chat=[chat.endpoint(ready=False)])
    assert chat.bodies == []
    await gateway.push(chat=[chat.endpoint()])

    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
    assert await gateway.metric("quire_gateway_held_requests", model="chat") == 0


async def test_request_before_the_first_list_of_models_waits_for_it(gateway, replicas):
    chat = await replicas("chat-0")
    call = asyncio.create_task(gateway.complete())
    await asyncio.sleep(0.05)  # long enough to see no effect
    assert not call.done()
    await gateway.push(chat=[chat.endpoint()])
    assert (await call)[0] == 200


async def test_models_are_listed_when_they_are_known(gateway, replicas):
    calls = [asyncio.create_task(gateway.page(path)) for path in ("/v1/models", "/v1/models/chat")]
    await asyncio.sleep(0.05)  # long enough to see no effect
    assert not any(call.done() for call in calls)
    await gateway.push(chat=[(await replicas("chat-0")).endpoint()])
    assert ["'id': 'chat'" in str(page) for page in await asyncio.gather(*calls)] == [True, True]


async def test_missing_list_of_models_is_503_and_not_404(start_gateway):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    status, body = await gateway.complete()
    assert (status, body["error"]["code"]) == (503, "no_replica_ready")


async def test_no_replica_in_time_is_503_with_retry_after(start_gateway):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    await gateway.push(chat=[])

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        body = await response.json()

    assert (response.status, body["error"]["code"]) == (503, "no_replica_ready")
    assert int(response.headers["Retry-After"]) > 0
    assert await gateway.metric("quire_gateway_hold_failures_total", reason="timeout") == 1


@pytest.mark.parametrize(("becomes_ready", "expected"), [(True, 200), (False, 503)])
async def test_request_waits_longer_while_a_replica_starts(start_gateway, replicas, becomes_ready, expected):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint(ready=False, starting=True)])
    call = asyncio.create_task(gateway.complete())
    await asyncio.sleep(0.2)  # long enough to see no effect
    assert not call.done()

    await gateway.push(chat=[chat.endpoint(ready=becomes_ready)])

    assert (await call)[0] == expected


async def test_hold_timeout_error_says_what_is_missing(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    loading = (await replicas("chat-0")).endpoint(ready=False)
    for endpoints, missing in (([], "none runs"), ([loading], "1 run, but are not ready")):
        await gateway.push(chat=endpoints)
        assert missing in (await gateway.complete())[1]["error"]["message"]


async def test_requests_beyond_the_hold_limit_are_refused_at_once(start_gateway):
    gateway = await start_gateway(hold_limit=2)
    await gateway.push(chat=[])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(2)]
    await gateway.until_held(2)

    status, body = await gateway.complete()

    assert (status, "2 requests already wait" in body["error"]["message"]) == (503, True)
    for call in calls:
        call.cancel()
    # A request that leaves the queue makes room.
    await gateway.until_held(0)


async def test_held_request_fails_when_its_model_is_removed(gateway):
    await gateway.push(chat=[])
    call = asyncio.create_task(gateway.complete())
    await gateway.until_held(1)

    await gateway.push()

    status, body = await call
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_requests_wait_for_a_restarting_replica(gateway, chat):
    restarting = True

    async def restart(request):
        return web.Response(status=503) if restarting else await chat.say_name(request)

    chat.behaviour = restart
    call = asyncio.create_task(gateway.complete())
    await gateway.until_held(1)

    restarting = False

    assert (await call)[0] == 200


async def test_hold_timeout_error_has_the_reason_of_the_replica(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])
    await chat.stop()

    status, body = await gateway.complete()

    assert status == 503
    assert "the last replica tried could not be reached" in body["error"]["message"]


async def test_held_and_active_requests_are_reported(gateway, replicas):
    """The autoscaler polls this twice a second: small, whatever the number of models."""
    busy, go_on = await replicas("busy-0"), asyncio.Event()
    busy.answer_after(go_on)
    await gateway.push(chat=[], busy=[busy.endpoint()], idle=[])
    calls = [asyncio.create_task(gateway.complete(model)) for model in ("chat", "chat", "busy")]
    await gateway.until_held(2)
    await busy.arrived.wait()

    body = await gateway.page("/requests")

    assert body == {"models": {"chat": {"held": 2, "inFlight": 0}, "busy": {"held": 0, "inFlight": 1}}}
    go_on.set()
    assert (await calls[2])[0] == 200
    for call in calls[:2]:
        call.cancel()


# --- the pace of the release ---


def starting(replica, gateway, *, max_running: int):
    """Configure a replica that runs that many requests at once, and record how many it got together."""
    replica.told = {"quire_max_running_requests": max_running}
    seen = {"now": 0, "most": 0, "order": []}

    async def run(request: web.Request) -> web.StreamResponse:
        seen["now"] += 1
        seen["most"] = max(seen["most"], seen["now"])
        seen["order"].append(replica.bodies[-1]["number"])
        await asyncio.sleep(0.01)
        seen["now"] -= 1
        return await replica.say_name(request)

    replica.behaviour = run
    return seen


async def test_held_requests_are_released_as_one_replica_can_run_them(start_gateway, replicas):
    gateway = await start_gateway(hold_limit=100, hold_timeout_seconds=30.0)
    chat = await replicas("chat-0")
    await gateway.push(chat=[])
    calls = []
    for number in range(40):
        calls.append(asyncio.create_task(gateway.complete(number=number)))
        await gateway.until_held(number + 1)
    seen = starting(chat, gateway, max_running=4)
    # It is scraped before it is ready, as a starting replica is.
    await gateway.push_and_scrape(chat=[chat.endpoint(ready=False)])
    await gateway.push(chat=[chat.endpoint()])

    # A request that arrives now waits behind earlier ones.
    late = asyncio.create_task(gateway.complete(number=40))

    assert {status for status, _ in await asyncio.gather(*calls, late)} == {200}
    assert seen["most"] <= 4
    assert seen["order"] == sorted(seen["order"])


async def test_only_one_request_tries_a_replica_that_refuses_all(start_gateway, replicas):
    gateway = await start_gateway(hold_limit=100, hold_timeout_seconds=30.0)
    chat = await replicas("chat-0")

    chat.refuse(503)
    await gateway.push(chat=[])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(20)]
    await gateway.until_held(20)
    began = monotonic()
    await gateway.push(chat=[chat.endpoint()])
    while len(chat.bodies) < 18:
        await asyncio.sleep(0.01)
    # One round of at most sixteen, the most for a replica whose limit is unknown; then one every half second.
    assert len(chat.bodies) - 16 <= 1 + (monotonic() - began) / 0.5

    chat.behaviour = chat.say_name

    assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_request_at_the_hold_timeout_joins_a_replica_queue(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.3)
    chat, go_on = await replicas("chat-0"), asyncio.Event()
    chat.told = {"quire_max_running_requests": 1}
    chat.answer_after(go_on)
    # While a replica is known to start, no request ends at its timeout.
    await gateway.push(chat=[chat.endpoint(ready=False, starting=True)])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(3)]
    await gateway.until_held(3)
    while any(backend.load is None for backend in gateway.gateway.fleet.backends()):
        await asyncio.sleep(0.01)
    await gateway.push(chat=[chat.endpoint()])
    while len(chat.bodies) < 3:
        await asyncio.sleep(0.01)
    go_on.set()
    assert {status for status, _ in await asyncio.gather(*calls)} == {200}


async def test_released_request_without_a_client_yields_its_turn(gateway, replicas):
    chat = await replicas("chat-0")
    chat.told = {"quire_max_running_requests": 1}
    await gateway.push(chat=[])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(4)]
    await gateway.until_held(4)
    await gateway.push(chat=[chat.endpoint()])
    calls[0].cancel()
    calls[1].cancel()
    assert [status for status, _ in await asyncio.gather(*calls[2:])] == [200, 200]
    while gateway.gateway._queue._lines:
        await asyncio.sleep(0.005)
    assert gateway.gateway.metrics.held["chat"] == 0


# --- the hold policy of one model ---


async def refused(gateway) -> tuple[int, str]:
    """Return status and Retry-After of a request that is held until its time limit."""
    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        return response.status, response.headers["Retry-After"]


async def test_retry_after_is_the_remaining_start_up_time(gateway):
    gateway.discovery.hold = HoldPolicy(timeout_seconds=0.05, start_up_seconds=90.0)
    await gateway.push(chat=[])
    assert await refused(gateway) == (503, "90")
    gateway.discovery.hold = HoldPolicy(timeout_seconds=0.05, start_up_seconds=0.01)
    await gateway.push(chat=[])
    assert await refused(gateway) == (503, "5")


async def test_number_of_held_requests_follows_the_model(gateway):
    gateway.discovery.hold = HoldPolicy(max_held=1, start_up_seconds=90.0)
    await gateway.push(chat=[])
    call = asyncio.create_task(gateway.complete())
    await gateway.until_held(1)
    assert await refused(gateway) == (503, "90")
    call.cancel()
    gateway.discovery.hold = HoldPolicy(max_held=0)
    await gateway.push(chat=[])
    assert await refused(gateway) == (503, "5")


async def test_hold_time_is_twice_the_start_up_at_least(start_gateway):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    for policy, seconds in (
        (HoldPolicy(), 0.05),
        (HoldPolicy(start_up_seconds=200.0), 400.0),
        (HoldPolicy(timeout_seconds=7.0, start_up_seconds=200.0), 7.0),
    ):
        gateway.discovery.hold = policy
        await gateway.push(chat=[])
        assert gateway.gateway._queue.timeout_seconds(gateway.gateway.fleet.pools["chat"]) == seconds


# --- comments while a stream waits ---


@pytest.fixture
def hasty(monkeypatch):
    """Allow comments more often than clients may request."""
    monkeypatch.setattr(event_stream, "_LEAST_SECONDS", 0.01)


COMMENT = ": waiting for a replica\n\n"


def commented(gateway, **body: object):
    headers = {WAIT_COMMENTS_HEADER: "0.01", "X-Request-Id": "mine"}
    return gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat", **body}, headers=headers)


async def test_waiting_stream_gets_comments_and_then_its_tokens(gateway, replicas, hasty):
    chat = await replicas("chat-0")

    async def stream(request: web.Request) -> web.StreamResponse:
        assert WAIT_COMMENTS_HEADER not in request.headers
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: "token"\n\ndata: [DONE]\n\n')
        return response

    chat.behaviour = stream
    await gateway.push(chat=[])
    async with commented(gateway, stream=True) as response:
        assert (response.status, response.content_type) == (200, "text/event-stream")
        assert response.headers["X-Request-Id"] == "mine"
        assert (await response.content.readuntil(b"\n\n")).decode() == COMMENT
        await gateway.push(chat=[chat.endpoint()])
        rest = (await response.text()).replace(COMMENT, "")
    assert rest == 'data: "token"\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("wish", "usual", "stream", "status"),
    [
        (None, 0.01, True, 200),
        ("much", 0.01, True, 200),
        ("0.01", 0.0, True, 200),
        ("0", 0.01, True, 503),
        (None, 0.0, True, 503),
        (None, 0.01, False, 503),
    ],
)
async def test_streams_get_comments_unless_unwanted(start_gateway, hasty, wish, usual, stream, status):
    gateway = await start_gateway(wait_comments_seconds=usual, hold_timeout_seconds=0.1)
    await gateway.push(chat=[])
    body, headers = {"model": "chat", "stream": stream}, {} if wish is None else {WAIT_COMMENTS_HEADER: wish}
    async with gateway.client.post(f"{gateway.url}/v1/completions", json=body, headers=headers) as response:
        text = await response.text()
    assert response.status == status and "no_replica_ready" in text
    assert text.startswith(COMMENT) == ("event: error" in text) == (status == 200)


async def test_client_ignores_comments(start_gateway, replicas, hasty):
    gateway = await start_gateway(wait_comments_seconds=0.01)
    chat, go_on = await replicas("chat-0"), asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"id": "token", "choices": []}\n\ndata: [DONE]\n\n')
        return response

    chat.behaviour = stream
    await gateway.push(chat=[chat.endpoint()])
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        # Returns with the head of the response, which begins with a comment.
        chunks = await client.chat.completions.create(model="chat", messages=[], stream=True)
        go_on.set()
        assert [chunk.id async for chunk in chunks] == ["token"]


@pytest.mark.parametrize("status", [400, 429])
async def test_error_after_comments_is_an_event(gateway, replicas, hasty, status):
    chat = await replicas("chat-0")

    chat.refuse(status, "bad")
    await gateway.push(chat=[])
    async with commented(gateway, stream=True) as response:
        await response.content.readuntil(b"\n\n")
        await gateway.push(chat=[chat.endpoint()])
        text = (await response.text()).replace(COMMENT, "")
    assert text == 'event: error\ndata: {"error": {"message": "no", "code": "bad"}}\n\n'


async def test_hold_that_fails_after_comments_is_an_event(start_gateway, hasty):
    gateway = await start_gateway(hold_timeout_seconds=0.2)
    await gateway.push(chat=[])
    async with commented(gateway, stream=True) as response:
        text = (await response.text()).replace(COMMENT, "")
    assert text.startswith("event: error\ndata: ") and '"no_replica_ready"' in text
    assert await gateway.metric("quire_gateway_errors_total", reason="no_replica_ready", code="503") == 1


async def test_client_that_leaves_ends_its_comments(gateway, hasty):
    await gateway.push(chat=[])
    async with commented(gateway, stream=True) as response:
        await response.content.readuntil(b"\n\n")
        response.close()
    await gateway.until_held(0)
