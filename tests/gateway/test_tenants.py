"""Engines learn the tenant of a key from the gateway, and never the key."""

import asyncio
import hashlib
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from set_clock import SetClock

from quire_common.contract.gateway import CANARY, STABLE, CanaryRoute
from quire_common.key_file import KeyFile
from quire_gateway.tenants import Tenants

KEYS = {"team-a": "sk-aaaaaaaaaa", "team-b": "sk-bbbbbbbbbb"}
FORMS = [
    {"Authorization": "Bearer {}"},
    {"authorization": "bearer {} "},
    {"x-api-key": "{}"},
    {"Authorization": "Bearer {}", "X-Api-Key": "{}", "Api-Key": "{}"},
    {"Authorization": "Basic eDp5", "X-Api-Key": "{}"},
    {"Authorization": "Bearer {}", "Connection": "authorization, x-quire-tenant, x-forwarded-for"},
]


@pytest.fixture
async def keyed(start_gateway, tmp_path: Path):
    """Return a gateway with the keys of two teams."""
    (tmp_path / "keys").write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    return await start_gateway(api_key_file=tmp_path / "keys")


def of(team: str, form: dict[str, str] = FORMS[0], **more: str) -> dict[str, str]:
    """Return headers with the key of a team."""
    return {name: value.format(KEYS[team]) for name, value in form.items()} | more


async def post(harness, headers: dict[str, str], *, path: str = "/v1/completions", model: str = "chat") -> int:
    async with harness.client.post(harness.url + path, json={"model": model}, headers=headers) as response:
        await response.read()
        return response.status


def shown(replica) -> str:
    """Return all headers that a replica has seen, as text."""
    return "\n".join(f"{name}: {value}" for seen in replica.headers for name, value in seen.items())


# --- what replicas see ---


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/tokenize"])
@pytest.mark.parametrize("form", FORMS)
async def test_no_form_of_a_key_reaches_a_replica(keyed, replicas, form: dict[str, str], path: str) -> None:
    replica = await replicas("chat-0")
    await keyed.push(chat=[replica.endpoint()])
    assert await post(keyed, of("team-a", form), path=path) == 200
    assert KEYS["team-a"] not in shown(replica) and "Authorization" not in replica.headers[0]
    assert len(replica.headers[0]["X-Quire-Tenant"]) == 64


async def test_retries_and_comparisons_state_the_tenant(keyed, replicas) -> None:
    """One replica refuses the request, another one answers it, and then the answers of both tracks are compared."""
    fleet = [await replicas(name) for name in ("chat-0", "chat-1", "chat-2")]

    async def answer(request: web.Request) -> web.StreamResponse:
        is_first = sum(len(replica.headers) for replica in fleet) == 1
        return web.json_response({}, status=429 if is_first else 200)

    for replica in fleet:
        replica.behaviour = answer
    keyed.discovery.canary = CanaryRoute(revision="r2", weight_percent=1, compared_percent=100.0)
    await keyed.push(chat=[replica.endpoint(track=CANARY if replica is fleet[2] else STABLE) for replica in fleet])
    body = {"model": "chat", "prompt": "x", "temperature": 0}
    async with keyed.client.post(f"{keyed.url}/v1/completions", json=body, headers=of("team-a")) as response:
        assert response.status == 200
    await asyncio.gather(*keyed.gateway.proxy.comparisons._running.values())
    seen = [headers for replica in fleet for headers in replica.headers]
    assert [headers["X-Request-Id"].endswith("-compared") for headers in seen].count(True) == 2 and len(seen) == 4
    assert len({headers["X-Quire-Tenant"] for headers in seen}) == 1
    assert not any(KEYS["team-a"] in shown(replica) for replica in fleet)


async def test_an_engine_learns_no_value_that_others_accept(keyed, replicas) -> None:
    """Values differ by tenant and LLMDeployment; the adapters of a model are one audience with it."""
    chat, code = await replicas("chat-0"), await replicas("code-0")
    await keyed.push(adapters={"legal": "chat"}, chat=[chat.endpoint()], code=[code.endpoint()])
    for team in KEYS:
        for model in ("chat", "legal", "code"):
            assert await post(keyed, of(team), model=model) == 200
    of_chat = [headers["X-Quire-Tenant"] for headers in chat.headers]
    of_code = [headers["X-Quire-Tenant"] for headers in code.headers]
    assert of_chat[0] == of_chat[1] and of_chat[2] == of_chat[3]
    assert len({*of_chat, *of_code}) == 4


async def test_a_client_cannot_state_a_tenant(keyed, start_gateway, replicas) -> None:
    """No gateway passes the header on, whether it checks keys or not."""
    replica, forged = await replicas("chat-0"), {"X-Quire-Tenant": "f" * 64, "x-quire-tenant": "e" * 64}
    open_gateway = await start_gateway()
    for harness in (keyed, open_gateway):
        await harness.push(chat=[replica.endpoint()])
        assert await post(harness, of("team-a", **forged)) == 200
    stated = [headers.getall("X-Quire-Tenant", []) for headers in replica.headers]
    assert [len(each) for each in stated] == [1, 0] and stated[0][0] not in forged.values()


async def test_key_of_the_engine_travels_in_a_header_of_its_own(keyed, start_gateway, replicas) -> None:
    replica = await replicas("chat-0")
    open_gateway = await start_gateway()
    for harness in (keyed, open_gateway):
        await harness.push(chat=[replica.endpoint()])
        assert await post(harness, of("team-a", **{"X-Quire-Engine-Key": "engine-key-1"})) == 200
    for headers in replica.headers:
        assert headers.getall("Authorization") == ["Bearer engine-key-1"]
        assert "X-Quire-Engine-Key" not in headers


async def test_gateway_without_keys_passes_authorization_on(gateway, replicas) -> None:
    """The engines check it."""
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    for form in (FORMS[0], {"x-api-key": "{}"}):
        assert await post(gateway, of("team-a", form)) == 200
    assert replica.headers[0]["Authorization"] == f"Bearer {KEYS['team-a']}"
    assert replica.headers[1]["X-Api-Key"] == KEYS["team-a"]


async def test_replicas_see_the_client_and_no_cookies(gateway, replicas) -> None:
    replica = await replicas("chat-0")
    await gateway.push(chat=[replica.endpoint()])
    for given_, expected in (({}, "127.0.0.1"), ({"X-Forwarded-For": "192.0.2.1"}, "192.0.2.1, 127.0.0.1")):
        assert await post(gateway, {"Cookie": "session=1"} | given_) == 200
        assert replica.headers[-1].getall("X-Forwarded-For") == [expected]
        assert "Cookie" not in replica.headers[-1]


# --- the values ---


def tenants(tmp_path: Path, text: str) -> tuple[Tenants, KeyFile]:
    file = tmp_path / hashlib.sha256(text.encode()).hexdigest()
    file.write_text(text)
    keys = KeyFile(file, SetClock())
    return Tenants(keys), keys


def value(tmp_path: Path, text: str, token: str = "key-of-a-1", audience: str = "ns/chat") -> str:
    found, keys = tenants(tmp_path, text)
    key = keys.find(token)
    assert key is not None
    return found.tenant_of(key).value_for(audience)


LINES = ("a:key-of-a-1", "a:key-of-a-2", "b:key-of-b-1", "key-unnamed-1")


@settings(max_examples=20)
@given(st.permutations(LINES), st.sampled_from(["", " # no", "\n\n"]), st.booleans())
def test_gateways_with_the_same_keys_agree(tmp_path_factory, lines, blank: str, limited: bool) -> None:
    """Neither the order of lines nor hashes, limits and comments matter, and keys of one name are one tenant."""
    tmp_path = tmp_path_factory.mktemp("keys")
    digest = hashlib.sha256(b"key-of-b-1").hexdigest()
    limit = "tokens_per_minute=5 " if limited else ""
    changed = [line.replace("b:key-of-b-1", f"{limit}name=b sha256:{digest}") for line in lines]
    text = f"#{blank}\n" + "\n".join(changed)
    assert value(tmp_path, text) == value(tmp_path, "\n".join(LINES)) == value(tmp_path, text, "key-of-a-2")


def test_value_depends_on_every_key_tenant_and_audience(tmp_path: Path) -> None:
    """A client needs all keys to compute a value."""
    text = "\n".join(LINES)
    values = [
        value(tmp_path, text),
        value(tmp_path, text, "key-of-b-1"),
        value(tmp_path, text, "key-unnamed-1"),
        value(tmp_path, text, audience="ns/other"),
        value(tmp_path, text.replace("key-of-b-1", "key-of-b-2")),
        value(tmp_path, "\n".join(LINES[:-1])),
    ]
    assert len(set(values)) == len(values)


def test_values_follow_the_key_file(tmp_path: Path) -> None:
    clock, file = SetClock(), tmp_path / "keys"
    file.write_text("a:key-of-a-1")
    keys = KeyFile(file, clock)
    found = Tenants(keys)
    first = keys.find("key-of-a-1")
    assert first is not None
    before = found.tenant_of(first).value_for("ns/chat")
    file.write_text("a:key-of-a-1\nb:key-of-b-1")
    clock.now = 2.0
    second = keys.find("key-of-a-1")
    assert second is not None
    after = found.tenant_of(second).value_for("ns/chat")
    assert before != after == value(tmp_path, file.read_text())
