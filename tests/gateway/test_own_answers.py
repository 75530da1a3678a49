"""The gateway's own answers are counted by model, status and reason, because replicas' metrics do not contain them."""

import asyncio

import pytest
from aiohttp import web


async def counted(harness, **labels: str) -> float:
    return await harness.metric("quire_gateway_errors_total", **labels)


async def test_unknown_model_creates_no_metric_series(gateway) -> None:
    await gateway.push(chat=[])
    for model in ("other", "another"):
        assert (await gateway.complete(model))[0] == 404
    assert await counted(gateway, model="", code="404", reason="model_not_found") == 2
    assert await counted(gateway) == 2


async def test_relayed_429_is_counted_by_reason(gateway, replicas) -> None:
    replica = await replicas("chat-0")
    replica.refuse(429)
    await gateway.push(chat=[replica.endpoint()])
    assert (await gateway.complete())[0] == 429
    assert await counted(gateway, model="chat", code="429", reason="busy") == 1


async def test_replica_lost_twice_is_a_gateway_error(gateway, replicas) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.Event().wait()
        raise AssertionError

    pair = [await replicas(name) for name in ("chat-0", "chat-1")]
    for replica in pair:
        replica.behaviour = die
    await gateway.push(chat=[replica.endpoint() for replica in pair])
    assert (await gateway.complete())[0] == 502
    assert await counted(gateway, model="chat", code="502", reason="replica_failed") == 1


async def test_replica_response_is_not_counted_as_gateway_error(gateway, replicas) -> None:
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    assert (await gateway.complete())[0] == 200
    assert await counted(gateway) == 0
    assert await gateway.metric("quire_gateway_requests_total", model="chat", code="200") == 1


@pytest.mark.parametrize(("method", "path"), [
    ("GET", "resp_1"), ("DELETE", "resp_1"), ("POST", "resp_1/cancel"), ("GET", "resp_1/input_items"),
])  # fmt: skip
async def test_responses_by_id_are_refused_by_the_gateway(gateway, replicas, method: str, path: str) -> None:
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    async with gateway.client.request(method, f"{gateway.url}/v1/responses/{path}") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (404, "responses_not_stored")
    assert "send the whole conversation in input" in error["message"] and replica.bodies == []
