"""Requests wait for a replica: bounded in number and time."""

import asyncio

from aiohttp import web


async def until_held(gateway, count: int) -> None:
    while gateway.gateway.metrics.held.get("chat", 0) != count:
        await asyncio.sleep(0.005)


async def test_request_at_zero_replicas_is_answered_by_the_first_that_comes(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[])

    calls = [asyncio.create_task(gateway.complete()) for _ in range(3)]
    await until_held(gateway, 3)
    assert await gateway.metric("quire_gateway_held_requests", model="chat") == 3
    await gateway.push(chat=[chat.endpoint(ready=False)])
    assert chat.bodies == []
    await gateway.push(chat=[chat.endpoint()])

    assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200, 200]
    assert await gateway.metric("quire_gateway_held_requests", model="chat") == 0


async def test_request_before_the_first_list_of_models_waits_for_it(gateway, replicas):
    chat = await replicas("chat-0")
    call = asyncio.create_task(gateway.complete())
    await asyncio.sleep(0.05)  # as long as it takes to come to nothing
    assert not call.done()
    await gateway.push(chat=[chat.endpoint()])
    assert (await call)[0] == 200


async def test_models_are_listed_when_they_are_known(gateway, replicas):
    async def listed(path: str) -> str:
        async with gateway.client.get(f"{gateway.url}{path}") as response:
            assert response.status == 200
            return await response.text()

    calls = [asyncio.create_task(listed(path)) for path in ("/v1/models", "/v1/models/chat")]
    await asyncio.sleep(0.05)  # as long as it takes to come to nothing
    assert not any(call.done() for call in calls)
    await gateway.push(chat=[(await replicas("chat-0")).endpoint()])
    assert all('"id":"chat"' in text for text in await asyncio.gather(*calls))


async def test_no_list_of_models_in_time_is_503_rather_than_that_there_is_no_such_model(start_gateway):
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


async def test_more_than_may_wait_are_refused_at_once(start_gateway):
    gateway = await start_gateway(hold_limit=2)
    await gateway.push(chat=[])
    calls = [asyncio.create_task(gateway.complete()) for _ in range(2)]
    await until_held(gateway, 2)

    status, body = await gateway.complete()

    assert (status, "2 requests already wait" in body["error"]["message"]) == (503, True)
    for call in calls:
        call.cancel()
    # Whoever leaves the waiting room makes room.
    await until_held(gateway, 0)


async def test_held_request_learns_that_its_model_is_gone(gateway):
    await gateway.push(chat=[])
    call = asyncio.create_task(gateway.complete())
    await until_held(gateway, 1)

    await gateway.push()

    status, body = await call
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_restarting_replica_is_waited_for(gateway, replicas):
    chat = await replicas("chat-0")
    restarting = True

    async def restart(request):
        return web.Response(status=503) if restarting else await chat.say_name(request)

    chat.behaviour = restart
    await gateway.push(chat=[chat.endpoint()])
    call = asyncio.create_task(gateway.complete())
    await until_held(gateway, 1)

    restarting = False

    assert (await call)[0] == 200


async def test_replica_that_is_down_says_why_when_time_is_up(start_gateway, replicas):
    gateway = await start_gateway(hold_timeout_seconds=0.05)
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])
    await chat.stop()

    status, body = await gateway.complete()

    assert status == 503
    assert "the last replica tried could not be reached" in body["error"]["message"]


async def test_requests_that_wait_and_run_are_told_to_whoever_asks(gateway, replicas):
    """What the autoscaler asks twice a second: small, whatever the number of models."""
    busy, go_on = await replicas("busy-0"), asyncio.Event()

    async def stall(request):
        await go_on.wait()
        return await busy.say_name(request)

    busy.behaviour = stall
    await gateway.push(chat=[], busy=[busy.endpoint()], idle=[])
    calls = [asyncio.create_task(gateway.complete(model)) for model in ("chat", "chat", "busy")]
    await until_held(gateway, 2)
    await busy.arrived.wait()

    async with gateway.client.get(f"{gateway.url}/requests") as response:
        body = await response.json()

    assert body == {"models": {"chat": {"held": 2, "inFlight": 0}, "busy": {"held": 0, "inFlight": 1}}}
    go_on.set()
    assert (await calls[2])[0] == 200
    for call in calls[:2]:
        call.cancel()
