"""Adapters share the replicas of their model, and requests prefer the replicas that have loaded them."""

import asyncio

from quire_common.contract.adapters_file import AdapterState
from quire_common.contract.gateway import Endpoint, ModelEndpoints
from quire_gateway.fleet import Fleet


async def test_an_adapter_is_served_by_the_replicas_of_its_model(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()], adapters={"legal": "chat"})

    status, body = await gateway.complete("legal")
    assert (status, body["served_by"]) == (200, "chat-0")
    assert chat.bodies == [{"model": "legal"}]
    assert await gateway.metric("quire_gateway_requests_total", model="legal", backend="chat-0") == 1


async def test_models_list_adapters_with_their_model(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()], adapters={"legal": "chat"})

    cards = {card["id"]: card.get("parent") for card in (await gateway.page("/v1/models"))["data"]}
    assert cards == {"chat": None, "legal": "chat"}
    assert (await gateway.page("/v1/models/legal"))["parent"] == "chat"


async def test_a_request_without_a_model_is_for_the_only_model(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()], adapters={"legal": "chat", "medical": "chat"})

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 200
    assert await gateway.metric("quire_gateway_requests_total", model="chat") == 1


async def test_requests_go_to_replicas_with_the_adapter(gateway, replicas):
    first, second = await replicas("chat-0"), await replicas("chat-1")
    second.adapters = {"legal": AdapterState.LOADED}
    await gateway.push(chat=[first.endpoint(), second.endpoint()], adapters={"legal": "chat"})
    backends = gateway.gateway.fleet.pools["legal"].backends
    while backends["chat-1"].adapters != second.adapters:
        await asyncio.sleep(0.01)

    for _ in range(10):
        assert (await gateway.complete("legal"))[1]["served_by"] == "chat-1"


async def test_unloaded_adapter_is_loaded_by_one_replica(gateway, replicas):
    """The first request decides which one; the next ones do not make the others load it too."""
    started = [await replicas(f"chat-{number}") for number in range(4)]
    await gateway.push(chat=[each.endpoint() for each in started], adapters={"legal": "chat"})

    assert len({(await gateway.complete("legal"))[1]["served_by"] for _ in range(10)}) == 1


async def test_autoscaler_counts_requests_of_adapters_for_the_model(gateway, replicas):
    chat = await replicas("chat-0")
    release = asyncio.Event()
    chat.answer_after(release)
    await gateway.push(chat=[chat.endpoint()], adapters={"legal": "chat", "medical": "chat"})
    requests = [asyncio.create_task(gateway.complete(name)) for name in ("legal", "medical", "chat")]
    while len(chat.bodies) < 3:
        await asyncio.sleep(0.01)
    assert (await gateway.page("/requests"))["models"] == {"chat": {"held": 0, "inFlight": 3}}
    assert await gateway.metric("quire_gateway_requests_in_flight") == 3
    release.set()
    await asyncio.gather(*requests)


async def test_a_held_request_for_an_adapter_is_demand_for_the_model(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[], adapters={"legal": "chat"})
    request = asyncio.create_task(gateway.complete("legal"))
    counts: dict = {}
    while not counts:
        counts = (await gateway.page("/requests"))["models"]
    assert counts == {"chat": {"held": 1, "inFlight": 0}}
    await gateway.push(chat=[chat.endpoint()], adapters={"legal": "chat"})
    assert (await request)[0] == 200


def snapshot(*models: ModelEndpoints) -> dict[str, ModelEndpoints]:
    return {model.name: model for model in models}


def test_shared_replicas_stay_until_no_model_lists_them() -> None:
    gone: list[str] = []
    fleet = Fleet(on_gone=lambda backend: gone.append(backend.endpoint.id))
    replica = Endpoint(id="a", url="http://127.0.0.1:1")
    chat = ModelEndpoints(name="chat", endpoints=[replica])
    legal = ModelEndpoints(name="legal", endpoints=[replica], adapter_of="chat")
    fleet.publish(snapshot(legal, chat), now=0)
    backend = fleet.pools["chat"].backends["a"]
    assert fleet.pools["legal"].backends["a"] is backend
    assert (fleet.backends(), backend.model, fleet.serves_adapters(backend)) == ([backend], "chat", True)
    assert fleet.pools["legal"].prefixes is not fleet.pools["chat"].prefixes  # their KV caches differ
    fleet.publish(snapshot(chat), now=1)
    assert (gone, fleet.serves_adapters(backend)) == ([], False)
    fleet.publish({}, now=2)
    assert (gone, fleet.backends()) == (["a"], [])
