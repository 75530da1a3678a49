"""Requests reach a replica of their model; the gateway's own answers have OpenAI's shape."""

import asyncio
import gzip
import io
import json
from time import monotonic

import pytest
from aiohttp import web
from yarl import URL


async def test_request_goes_to_a_replica_of_the_model_it_names(gateway, replicas):
    chat, code = await replicas("chat-0"), await replicas("code-0")
    await gateway.push(chat=[chat.endpoint()], code=[code.endpoint()])

    assert (await gateway.complete("chat"))[1]["served_by"] == "chat-0"
    assert (await gateway.complete("code"))[1]["served_by"] == "code-0"


async def test_body_and_headers_reach_the_replica_unchanged(gateway, chat):
    body = {"model": "chat", "messages": [{"role": "user", "content": "grüße 🙂"}], "top_k": 3}

    headers = {
        "Authorization": "Bearer k",
        "X-Request-Id": "abc-1",
        "traceparent": "00-1",
        "Connection": "x-hop",
        "x-hop": "1",
    }
    async with gateway.client.post(f"{gateway.url}/v1/chat/completions?a=b", json=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["X-Request-Id"] == "abc-1"
        assert response.headers["X-Quire-Replica"] == "chat-0"

    assert chat.bodies == [body]
    seen = chat.headers[0]
    assert (seen["Authorization"], seen["X-Request-Id"], seen["traceparent"]) == ("Bearer k", "abc-1", "00-1")
    assert "x-hop" not in seen
    assert seen["Content-Type"] == "application/json"


async def test_request_id_is_generated_and_sent_to_the_replica(gateway, chat):
    async with gateway.client.post(
        f"{gateway.url}/v1/completions", json={"model": "chat"}, headers={"X-Request-Id": "a b\tc"}
    ) as response:
        given = response.headers["X-Request-Id"]

    assert given == chat.headers[0]["X-Request-Id"]
    assert len(given) == 32


async def test_error_has_the_request_id_that_the_replicas_and_the_log_have(gateway, replicas, caplog):
    chat = await replicas("chat-0")

    async def die(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    chat.behaviour = die
    await gateway.push(chat=[chat.endpoint()])
    caplog.set_level("INFO")

    async with gateway.client.post(f"{gateway.url}/v1/completions", json={"model": "chat"}) as response:
        assert response.status == 502
        given = response.headers["X-Request-Id"]

    assert {headers["X-Request-Id"] for headers in chat.headers} == {given}
    assert f"retrying request {given}" in caplog.text


async def test_compressed_body_is_decompressed_once(gateway, chat):
    async with gateway.client.post(
        f"{gateway.url}/v1/completions",
        data=gzip.compress(json.dumps({"model": "chat"}).encode()),
        headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
    ) as response:
        assert response.status == 200
    assert chat.bodies == [{"model": "chat"}]


async def test_all_models_are_listed_even_at_zero_replicas(gateway, replicas):
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()], **{"org/big": []})

    listing = await gateway.page("/v1/models")
    assert [model["id"] for model in listing["data"]] == ["chat", "org/big"]
    assert {model["object"] for model in listing["data"]} == {"model"}
    async with gateway.client.get(f"{gateway.url}/v1/models/org/big") as response:
        assert (response.status, (await response.json())["id"]) == (200, "org/big")


async def test_models_have_the_fields_of_the_engines_list(gateway, replicas):
    one, two = await replicas("chat-0"), await replicas("chat-1")
    one.told, two.told = {"quire_max_model_len": 8192}, {"quire_max_model_len": 4096}
    await gateway.push_and_scrape(chat=[one.endpoint(), two.endpoint()], **{"org/big": []})
    cards = {card["id"]: card for card in (await gateway.page("/v1/models"))["data"]}
    assert (cards["chat"]["max_model_len"], cards["org/big"]["max_model_len"]) == (4096, None)
    assert [cards["chat"][name] for name in ("root", "parent")] == ["chat", None]


async def test_removed_model_is_unknown(gateway, chat):
    assert (await gateway.complete())[0] == 200

    await gateway.push()

    status, body = await gateway.complete()
    assert (status, body["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("payload", "status", "words"),
    [
        (b'{"model": "nope"}', 404, "'nope' does not exist; served models: chat"),
        (b"{", 400, "not valid JSON"),
        (b"\xff\xfe", 400, "not valid JSON"),
        (b"[1]", 400, 'JSON object with a string "model"'),
        (b'{"model": 7}', 400, 'JSON object with a string "model"'),
        (b'{"model": ""}', 404, "'' does not exist; served models: chat"),
        (b"", 400, "not valid JSON"),
        (b'{"model": "chat", "x": "' + b"a" * 5000 + b'"}', 413, "limit of 4096 bytes"),
        (b'{"model": "chat", "x": ' + b"[" * 2000 + b"]" * 2000 + b"}", 400, "nested too deeply"),
    ],
)
async def test_wrong_request_gets_an_error_in_openai_shape(start_gateway, replicas, payload, status, words):
    gateway = await start_gateway(max_body_bytes=4096)
    chat = await replicas("chat-0")
    await gateway.push(chat=[chat.endpoint()])

    async with gateway.client.post(f"{gateway.url}/v1/completions", data=payload) as response:
        body = await response.json()

    assert response.status == status
    assert words in body["error"]["message"]
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert len(str(body)) < 4096
    assert chat.bodies == []


@pytest.mark.parametrize("payload", [{}, {"model": None}])
async def test_request_without_model_means_the_only_one(gateway, replicas, payload):
    chat = await replicas("chat-0")
    for others, status in ({}, 200), ({"org/big": []}, 400):
        await gateway.push(chat=[chat.endpoint()], **others)
        async with gateway.client.post(f"{gateway.url}/v1/completions", json=payload) as response:
            body = await response.json()
        assert response.status == status
    assert (body["error"]["param"], body["error"]["code"]) == ("model", "missing_required_parameter")
    assert "served models: chat, org/big" in body["error"]["message"]
    assert chat.bodies == [payload]


@pytest.mark.parametrize("packing", ["gzip", "deflate"])
async def test_undecodable_body_is_a_bad_request(gateway, chat, packing):
    async with gateway.client.post(
        f"{gateway.url}/v1/completions", data=b'{"model": "chat"}', headers={"Content-Encoding": packing}
    ) as response:
        body = await response.json()

    assert response.status == 400
    assert f"Can not decode content-encoding: {packing}" in body["error"]["message"]
    assert chat.bodies == []


@pytest.mark.parametrize(
    "target",
    ["/v1/completions?a=b%2Fc", "http://quire.example/v1/completions?a=b%2Fc", "https://x:1/v1/completions?a=b%2Fc"],
)
async def test_request_target_may_be_a_whole_url(gateway, chat, target):
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.raw_path)
        return web.json_response({})

    chat.behaviour = answer
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    body = b'{"model": "chat"}'
    lines = f"POST {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(lines.encode() + body)
    answered = await reader.read()
    writer.close()

    assert answered.startswith(b"HTTP/1.1 200 ")
    assert seen == ["/v1/completions?a=b%2Fc"]


async def test_tokenize_requests_count_as_no_load_and_no_prefix(gateway, replicas):
    one, two = await replicas("one"), await replicas("two")
    await gateway.push(chat=[one.endpoint(), two.endpoint()])
    pool = gateway.gateway.fleet.pools["chat"]

    for path, blocks, sent in (("/tokenize", 0, False), ("/v1/completions", 7, True)):
        async with gateway.client.post(
            f"{gateway.url}{path}", json={"model": "chat", "prompt": "x" * 2000}
        ) as response:
            assert response.status == 200
        assert len(pool.prefixes) == blocks
        assert any(backend.sent_tokens > 0 for backend in pool.backends.values()) == sent


async def test_ready_only_after_the_first_list_of_replicas(start_gateway):
    gateway = await start_gateway()

    async def probe(path: str) -> int:
        async with gateway.client.get(f"{gateway.url}{path}") as response:
            return response.status

    assert (await probe("/livez"), await probe("/readyz"), await probe("/health")) == (200, 503, 503)
    await gateway.push()
    assert (await probe("/livez"), await probe("/readyz"), await probe("/health")) == (200, 200, 200)


async def test_large_body_passes(gateway, chat):
    body = io.BytesIO(json.dumps({"model": "chat", "prompt": "x" * 3_000_000}).encode())

    async with gateway.client.post(f"{gateway.url}/v1/completions", data=body) as response:
        assert response.status == 200

    assert len(chat.bodies[0]["prompt"]) == 3_000_000


async def test_scraped_queue_turns_requests_to_the_idle_replica(gateway, replicas):
    busy, idle = await replicas("busy"), await replicas("idle")
    busy.load |= {"running": 8, "waiting": 5}
    await gateway.push(chat=[busy.endpoint(), idle.endpoint()])
    busy.scraped.clear()
    idle.scraped.clear()
    await asyncio.gather(busy.scraped.wait(), idle.scraped.wait())
    while any(backend.load is None for backend in gateway.gateway.fleet.backends()):
        await asyncio.sleep(0.01)

    answers = [await gateway.complete() for _ in range(5)]

    assert {body["served_by"] for _, body in answers} == {"idle"}


async def test_prompts_go_to_the_replica_with_the_fewest_tokens_left(gateway, replicas):
    fleet = [await replicas(name) for name in "ab"]
    for replica, tokens in zip(fleet, (6000, 4000), strict=True):
        replica.told = {"quire_pending_prefill_tokens": tokens}
    fleet[1].load |= {"running": 5, "waiting": 2}
    await gateway.push_and_scrape(chat=[replica.endpoint() for replica in fleet])

    prompt = "x" * 1000 * 4
    answers = [await gateway.complete(prompt=f"{turn}{prompt}") for turn in range(4)]

    # A thousand tokens each, by the usual ratio: the third finds both with 6,000 and goes to the one with fewer
    # requests.
    assert [body["served_by"] for _, body in answers] == ["b", "b", "a", "b"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1//load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1/%6coad_lora_adapter",
        "/admin/drain",
        "/start_profile",
        "/v1/start_profile",
        "/sleep",
        "/metrics",
        "/v1/chat/completions/",
        *("/", "/v2/completions", "/v1/../admin/drain", "/v1/%2e%2e/admin/drain"),
    ],
)
async def test_administrative_route_reaches_no_replica(gateway, replicas, path: str):
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    async with gateway.client.post(URL(gateway.url + path, encoded=True), json={"model": "chat"}) as response:
        assert response.status == 404 and (await response.json())["error"]["code"] == "not_found"
    assert replica.bodies == []


async def test_replica_that_answers_no_scrape_comes_after_the_others(gateway, replicas, monkeypatch):
    monkeypatch.setattr("quire_gateway.scrape.SCRAPE_SECONDS", 0.05)
    monkeypatch.setattr("quire_gateway.fleet._SILENT_SECONDS", 0.1)
    fleet = [await replicas(f"chat-{number}") for number in range(3)]
    await gateway.push(chat=[replica.endpoint() for replica in fleet])
    backends = gateway.gateway.fleet.pools["chat"].backends

    async def until_silent(*numbers: int) -> None:
        for number, replica in enumerate(fleet):
            (replica.answers_scrapes.clear if number in numbers else replica.answers_scrapes.set)()
        while {number for number in range(3) if backends[f"chat-{number}"].is_silent(monotonic())} != set(numbers):
            await asyncio.sleep(0.005)

    async def served_by() -> set[object]:
        return {(await gateway.complete())[1]["served_by"] for _ in range(30)}

    await until_silent(1)
    # The others are scraped on time, although one scrape is not answered.
    load_time = backends["chat-0"].load_time
    while backends["chat-0"].load_time == load_time:
        await asyncio.sleep(0.005)
    assert await served_by() == {"chat-0", "chat-2"}
    await until_silent(0, 1, 2)
    assert await served_by() == {"chat-0", "chat-1", "chat-2"}
    await until_silent()
    assert await served_by() == {"chat-0", "chat-1", "chat-2"}
