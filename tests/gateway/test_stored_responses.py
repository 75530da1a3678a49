"""Responses that replicas keep, through the gateway: the id of a response leads every gateway to its replica."""

import asyncio
import json

import openai
import pytest
from aiohttp import web

from quire_common.contract.engine import ENGINE_STOPPED
from quire_common.response_ids import new_response_id, replica_tag, tag_of


def test_an_id_names_its_replica_and_cannot_be_guessed() -> None:
    tag = replica_tag("team/chat-0")
    first, second = new_response_id(tag), new_response_id(tag)
    assert first != second and tag_of(first) == tag_of(second) == tag and "chat" not in first
    assert tag_of(new_response_id(None)) is None
    assert tag_of(new_response_id("../../etc")) is None


@pytest.mark.parametrize("text", ["", "resp_", "resp_0123456789ab_", "chatcmpl-1", new_response_id(None) + "0"])
def test_other_ids_name_no_replica(text: str) -> None:
    assert tag_of(text) is None


class Keeper:
    """The behaviour of a replica that keeps responses."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.kept: dict[str, dict[str, object]] = {}
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.method, request.path))
        if request.path == "/v1/responses":
            body = await request.json()
            previous = body.get("previous_response_id")
            if previous is not None and previous not in self.kept:
                error = {"message": "x", "type": "x", "param": None, "code": "previous_response_not_found"}
                return web.json_response({"error": error}, status=400)
            id = new_response_id(request.headers.get("X-Quire-Replica-Tag"))
            self.kept[id] = {"id": id, "object": "response", "status": "completed", "output": [], "model": self.name}
            return web.json_response(self.kept[id])
        return web.json_response(self.kept[request.path.split("/")[3]])


async def keepers(gateway, replicas, *names: str) -> dict[str, Keeper]:
    made = {}
    endpoints = []
    for name in names:
        replica = await replicas(name)
        made[name] = replica.behaviour = Keeper(name)
        endpoints.append(replica.endpoint())
    await gateway.push(chat=endpoints)
    return made


async def test_stored_response_is_read_from_its_replica(gateway, replicas) -> None:
    made = await keepers(gateway, replicas, "chat-0", "chat-1", "chat-2")
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        found = [await client.responses.create(model="chat", input="hi") for _ in range(32)]
        assert len({response.model for response in found}) > 1
        for response in found:
            assert tag_of(response.id) == replica_tag(response.model)
            assert (await client.responses.retrieve(response.id)).model == response.model
            assert (await client.responses.cancel(response.id)).model == response.model
            await client.responses.delete(response.id)
            again = await client.responses.create(model="chat", input="hi", previous_response_id=response.id)
            assert again.model == response.model
    assert all(keeper.asked for keeper in made.values())


async def test_response_of_a_removed_replica_is_lost(gateway, replicas) -> None:
    made = await keepers(gateway, replicas, "chat-0")
    gone = new_response_id(replica_tag("chat-9"))
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="k", max_retries=0) as client:
        for id in (gone, "resp_other"):
            with pytest.raises(openai.NotFoundError) as lost:
                await client.responses.retrieve(id)
            assert lost.value.code == "response_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="chat", input="hi", previous_response_id=gone)
        assert refused.value.code == "previous_response_not_found"
    assert made["chat-0"].asked == [("POST", "/v1/responses")]


async def test_the_clients_own_tag_is_replaced(gateway, replicas) -> None:
    await keepers(gateway, replicas, "chat-0")
    body = {"model": "chat", "input": "hi"}
    headers = {"X-Quire-Replica-Tag": "0123456789ab"}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=body, headers=headers) as response:
        assert tag_of(json.loads(await response.read())["id"]) == replica_tag("chat-0")


async def test_keys_and_limits_hold_for_stored_responses(start_gateway, replicas, tmp_path) -> None:
    (tmp_path / "keys").write_text("name=alice requests_per_minute=3 alice-key-1\n")
    gateway = await start_gateway(api_key_file=tmp_path / "keys")
    await keepers(gateway, replicas, "chat-0")
    address = f"{gateway.url}/v1/responses/{new_response_id(replica_tag('chat-9'))}"
    statuses = []
    for _ in range(5):
        async with gateway.client.get(address, headers={"Authorization": "Bearer alice-key-1"}) as response:
            statuses.append(response.status)
    assert statuses == [404, 404, 404, 429, 429]
    async with gateway.client.get(address) as response:
        assert response.status == 401


async def continued(gateway, keeper: str) -> tuple[int, dict[str, object]]:
    """Continue a response of a replica, and return the status and the body of the answer."""
    body = {"model": "chat", "input": "hi", "previous_response_id": new_response_id(replica_tag(keeper))}
    async with gateway.client.post(f"{gateway.url}/v1/responses", json=body) as response:
        return response.status, await response.json()


async def test_continuation_waits_for_its_replica_and_asks_no_other(gateway, replicas) -> None:
    keeper, other = await replicas("chat-0"), await replicas("chat-1")
    await gateway.push(chat=[keeper.endpoint(ready=False), other.endpoint()])
    call = asyncio.create_task(continued(gateway, "chat-0"))
    await gateway.until_held(1)
    assert (await gateway.complete())[1]["served_by"] == "chat-1"
    await gateway.push(chat=[keeper.endpoint(), other.endpoint()])
    assert (await call)[1]["served_by"] == "chat-0"
    assert [len(replica.bodies) for replica in (keeper, other)] == [1, 1]


async def test_continuation_whose_replica_stays_away_fails_in_time(start_gateway, replicas) -> None:
    gateway = await start_gateway(hold_timeout_seconds=0.2)
    keeper, other = await replicas("chat-0"), await replicas("chat-1")
    await gateway.push(chat=[keeper.endpoint(ready=False), other.endpoint()])
    status, body = await continued(gateway, "chat-0")
    assert (status, body["error"]["code"]) == (503, "no_replica_ready")
    assert (await gateway.complete())[0] == 200
    assert gateway.gateway.metrics.held["chat"] == 0


async def test_continuation_does_not_hammer_a_replica_that_died(start_gateway, replicas) -> None:
    gateway = await start_gateway(hold_timeout_seconds=1.0)
    keeper, other = await replicas("chat-0"), await replicas("chat-1")
    await gateway.push(chat=[keeper.endpoint(), other.endpoint()])
    await keeper.stop()
    assert (await continued(gateway, "chat-0"))[0] == 503
    assert await gateway.metric("quire_gateway_retries_total", model="chat", reason="unreachable") <= 3
    assert other.bodies == []


async def test_continuation_that_was_lost_is_tried_at_its_replica(gateway, replicas) -> None:
    keeper, other = await replicas("chat-0"), await replicas("chat-1")

    async def stop_once(request: web.Request) -> web.StreamResponse:
        keeper.behaviour = keeper.say_name
        return web.json_response({"error": {"message": "no", "code": ENGINE_STOPPED}}, status=503)

    keeper.behaviour, other.behaviour = stop_once, Keeper("chat-1")
    await gateway.push(chat=[keeper.endpoint(), other.endpoint()])
    assert (await continued(gateway, "chat-0")) == (200, {"object": "text_completion", "served_by": "chat-0"})
    assert (len(keeper.bodies), other.bodies) == (2, [])


async def test_continuation_of_a_terminating_replica_is_lost_at_once(gateway, replicas) -> None:
    keeper, other = await replicas("chat-0"), await replicas("chat-1")
    other.behaviour = Keeper("chat-1")
    await gateway.push(chat=[keeper.endpoint(terminating=True), other.endpoint()])
    status, body = await continued(gateway, "chat-0")
    assert (status, body["error"]["code"]) == (400, "previous_response_not_found")
    assert keeper.bodies == []
