"""TLS and API keys: unusable files stop the start, changed files apply to new connections, probes need no key."""

import asyncio
import hashlib
from pathlib import Path

import aiohttp
import pytest
import trustme
from set_clock import SetClock
from tls_files import issue, trusting

from quire_gateway.__main__ import main
from quire_gateway.app import OPEN_PATHS


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


# --- certificates ---


async def test_new_connections_get_the_current_certificate(
    start_gateway, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A half-written rotation is logged and changes nothing; then the new pair applies."""
    clock = SetClock()
    monkeypatch.setattr("quire_gateway.__main__.monotonic", clock)
    harness = await start_gateway(tls=issue(authority, tmp_path))
    trust = trusting(authority)

    async def shown() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", harness.port, ssl=trust)
        certificate = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        await writer.wait_closed()
        return certificate

    first = await shown()
    assert await shown() == first
    (tmp_path / "tls.crt").write_text("half a certific")
    clock.now += 1.0
    assert await shown() == first
    issue(authority, tmp_path)
    clock.now += 1.0
    assert await shown() != first


async def test_tls_port_serves_no_plain_http(start_gateway, replicas, authority: trustme.CA, tmp_path: Path) -> None:
    harness = await start_gateway(tls=issue(authority, tmp_path))
    replica = await replicas("chat-0")
    await harness.push(chat=[replica.endpoint()])
    connector = aiohttp.TCPConnector(ssl=trusting(authority))
    async with aiohttp.ClientSession(f"https://127.0.0.1:{harness.port}", connector=connector) as client:
        for path in ("/livez", "/readyz", "/metrics", "/v1/models"):
            async with client.get(path) as response:
                assert response.status == 200
        async with client.post("/v1/completions", json={"model": "chat"}) as response:
            assert (await response.json())["served_by"] == "chat-0"
    with pytest.raises(aiohttp.ClientError):
        await harness.complete()


# --- keys ---

KEY, OTHER = "sk-0123456789", "sk-9876543210"


def hashed(key: str) -> str:
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


async def ask(harness, path: str, authorization: str | None = None) -> tuple[int, str | None, str | None]:
    """Return status, the error's code, and the WWW-Authenticate header."""
    headers = {} if authorization is None else {"Authorization": authorization}
    method = "POST" if path.startswith(("/v1/completions", "/tokenize")) else "GET"
    body = {"model": "chat"} if method == "POST" else None
    async with harness.client.request(method, harness.url + path, json=body, headers=headers) as response:
        is_json = response.content_type == "application/json"
        error = (await response.json()).get("error") if is_json else None
        return response.status, error and error["code"], response.headers.get("WWW-Authenticate")


@pytest.fixture
async def keyed(start_gateway, replicas, tmp_path: Path):
    (tmp_path / "keys").write_text(f"# of team a\nteam-a:{hashed(KEY)}\n")
    harness = await start_gateway(api_key_file=tmp_path / "keys")
    replica = await replicas("chat-0")
    await harness.push(chat=[replica.endpoint()])
    return harness, replica


async def test_known_key_is_accepted(keyed) -> None:
    harness, _ = keyed
    assert await ask(harness, "/v1/completions", f"Bearer {KEY}") == (200, None, None)
    assert await ask(harness, "/v1/models", f"bearer {KEY} ") == (200, None, None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/models/chat", "/tokenize", "/nothing"])
@pytest.mark.parametrize(
    ("authorization", "code"),
    [
        (None, "missing_api_key"),
        ("", "missing_api_key"),
        ("Bearer ", "missing_api_key"),
        (f"Basic {KEY}", "missing_api_key"),
        (f"Bearer {OTHER}", "invalid_api_key"),
        (f"Bearer {hashed(KEY)}", "invalid_api_key"),
    ],
)
async def test_missing_and_unknown_keys_get_401(keyed, path, authorization, code) -> None:
    harness, replica = keyed
    assert await ask(harness, path, authorization) == (401, code, "Bearer")
    assert replica.bodies == []
    assert await harness.metric("quire_gateway_errors_total", code="401", reason=code, model="") == 1


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_and_scrapers_need_no_key(keyed, path) -> None:
    harness, _ = keyed
    assert (await ask(harness, path))[0] == 200


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--ssl-certfile", "{tmp}/none"], "--ssl-certfile: expected a file that can be read"),
        (["--ssl-keyfile", "{tmp}/there"], "--ssl-keyfile requires --ssl-certfile"),
        (["--ssl-certfile", "{tmp}/there"], "do not contain a certificate and its private key"),
        (["--api-key-file", "{tmp}/none"], "--api-key-file: expected a file that can be read"),
        (["--api-key-file", "{tmp}/there"], "there, line 1: expected KEY"),
    ],
)
def test_unusable_file_is_reported_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str
) -> None:
    (tmp_path / "there").write_text("short")
    (tmp_path / "endpoints").write_text('{"models": []}')
    given = [argument.format(tmp=tmp_path) for argument in arguments]
    assert main(["--port", "0", "--endpoints-file", str(tmp_path / "endpoints"), *given]) == 2
    shown = capsys.readouterr().err
    assert problem in shown and "Traceback" not in shown


# --- the process, whose event loop has its own TLS implementation ---
