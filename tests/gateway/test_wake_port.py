"""Requests to the Services of LLMDeployments without ready replicas: the port on which they arrive."""

import asyncio
from pathlib import Path

import pytest

from quire_common.errors import ConfigurationError
from quire_gateway.config import parse_config
from quire_gateway.wake import service_named

SERVICES = ("team-a/chat", "team-b/chat", "team-b/code")


@pytest.mark.parametrize(
    ("host", "service"),
    [
        ("chat.team-a", "team-a/chat"),
        ("chat.team-b.svc", "team-b/chat"),
        ("chat.team-a.svc.cluster.local:8000", "team-a/chat"),
        ("Chat.Team-A.svc.cluster.local.", "team-a/chat"),
        ("code", "team-b/code"),
        ("code:8000", "team-b/code"),
        ("chat", ""),
        ("chat.team-c", ""),
        ("chat.team-a.example.com", ""),
        ("10.0.0.1:8000", ""),
        ("[fd00::1]:8000", ""),
        ("", ""),
    ],
)
def test_a_host_header_names_a_known_service(host: str, service: str) -> None:
    assert service_named(host, SERVICES) == service


def test_a_model_without_a_service_matches_no_host() -> None:
    assert service_named("", [""]) == ""


@pytest.fixture
async def waking(start_gateway, replicas):
    """Return a gateway with a wake port and two models of one tenant, one of them with an adapter."""
    harness = await start_gateway(wake_port=0)
    chat, code = await replicas("chat-0"), await replicas("code-0")
    harness.discovery.services = {"team-a/chat": "team-a/chat", "team-a/code": "team-a/code"}
    models = {"team-a/chat": [chat.endpoint()], "team-a/code": [code.endpoint()]}
    await harness.push(adapters={"team-a/legal": "team-a/chat"}, **models)
    harness.replica = chat
    return harness


async def ask(
    harness,
    body: dict,
    *,
    host: str = "chat.team-a.svc.cluster.local:8000",
    path: str = "/v1/completions",
    **headers: str,
):
    url = f"http://127.0.0.1:{harness.gateway.wake_port}{path}"
    async with harness.client.post(url, json=body, headers={"Host": host} | headers) as response:
        return response.status, await response.json(), response.headers


@pytest.mark.parametrize(
    ("body", "served_by"),
    [
        ({}, "chat-0"),
        ({"model": "chat"}, "chat-0"),
        ({"model": "team-a/chat"}, "chat-0"),
        ({"model": "legal"}, "chat-0"),
        ({"model": "team-a/legal"}, "chat-0"),
    ],
)
async def test_a_service_serves_its_model_by_any_of_its_names(waking, body: dict, served_by: str) -> None:
    status, answer, headers = await ask(waking, body)
    assert (status, answer["served_by"]) == (200, served_by)
    assert headers["Connection"] == "close", "the next request must reach a replica directly"


@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/rerank", "/rerank", "/v2/rerank", "/v1/score", "/score", "/tokenize", "/detokenize"]
)
async def test_routes_without_v1_reach_a_replica_on_the_wake_port(waking, path: str) -> None:
    status, answer, _ = await ask(waking, {}, path=path)
    assert (status, answer["served_by"]) == (200, "chat-0")


async def test_a_service_serves_no_model_of_another_one(waking) -> None:
    status, answer, _ = await ask(waking, {"model": "code"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert "team-a/chat, team-a/legal" in answer["error"]["message"]


async def test_unknown_host_header_routes_by_model(waking) -> None:
    status, answer, _ = await ask(waking, {"model": "team-a/code"}, host="models.example.com")
    assert (status, answer["served_by"]) == (200, "code-0")
    status, answer, _ = await ask(waking, {}, host="models.example.com")
    assert (status, answer["error"]["code"]) == (400, "missing_required_parameter")


async def test_only_the_models_of_the_service_are_listed(waking) -> None:
    url = f"http://127.0.0.1:{waking.gateway.wake_port}"
    async with waking.client.get(f"{url}/v1/models", headers={"Host": "chat.team-a"}) as response:
        assert [model["id"] for model in (await response.json())["data"]] == ["team-a/chat", "team-a/legal"]
    for path in ("/metrics", "/requests", "/tracks"):
        async with waking.client.get(f"{url}{path}", headers={"Host": "chat.team-a"}) as response:
            assert response.status == 404


async def held(harness) -> int:
    """Return the number of held requests, which the operator polls."""
    return (await harness.page("/requests"))["models"].get("chat", {}).get("held", 0)


async def test_a_request_waits_for_the_first_replica(start_gateway, replicas) -> None:
    harness = await start_gateway(wake_port=0)
    harness.discovery.services = {"chat": "ns/chat"}
    await harness.push(chat=[])
    waiting = asyncio.create_task(ask(harness, {}, host="chat.ns"))
    while (await held(harness)) != 1:
        assert not waiting.done(), "the operator starts a replica for what is held"
        await asyncio.sleep(0.01)
    await harness.push(chat=[(await replicas("chat-0")).endpoint()])
    status, answer, _ = await waiting
    assert (status, answer["served_by"]) == (200, "chat-0")


async def test_engine_keys_pass_the_gateway_without_its_own(start_gateway, replicas, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-0123456789abcdef\n")
    harness = await start_gateway(wake_port=0, api_key_file=keys)
    replica = await replicas("chat-0")
    harness.discovery.services = {"chat": "ns/chat"}
    await harness.push(chat=[replica.endpoint()])
    assert (await harness.complete())[0] == 401
    status, _, _ = await ask(harness, {}, host="chat.ns", Authorization="Bearer key-of-the-engine")
    assert (status, replica.headers[-1]["Authorization"]) == (200, "Bearer key-of-the-engine")


async def test_stopping_closes_both_ports(start_gateway) -> None:
    harness = await start_gateway(wake_port=0)
    port = harness.gateway.wake_port
    await harness.gateway.stop()
    for closed in (port, harness.port):
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", closed)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--kubernetes", "--wake-port", "8000"], "--wake-port must differ from --port"),
        (["--endpoints-file", "e.json", "--wake-port", "8001"], "--wake-port requires --kubernetes"),
        (["--kubernetes", "--wake-port", "no"], "--wake-port"),
    ],
)
def test_unusable_wake_ports_are_refused(flags: list[str], problem: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        parse_config(flags, {})
    assert any(problem in found for found in raised.value.problems)
