"""The webhook's server: an unusable certificate stops only the webhook."""

import asyncio
import shutil
import ssl
from pathlib import Path
from typing import Any

import aiohttp
import kopf
import pytest

from quire_cluster.certificates import Authority, KeyPair
from quire_cluster.ports import free_ports
from quire_operator.admission import ALLOWED, Review
from quire_operator.app.settings import WebhookOptions
from quire_operator.app.watches import Webhook, reviews_server


async def judge(new: Any, old: Any) -> Review:
    return ALLOWED


async def called(*_: Any, **__: Any) -> Any:
    return {}


def of(port: int, files: KeyPair, client_ca: Path | None = None) -> Webhook:
    options = WebhookOptions(
        host="127.0.0.1", port=port, certificate=files.certificate, key=files.key, client_ca=client_ca
    )
    return Webhook(options=options, judge=judge, judge_adapter=judge)


async def test_server_recovers_once_certificate_and_key_match(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path / "pki")
    authority.create()
    first, second = (authority.issue(name, subject=f"/CN={name}", alternative_names="IP:127.0.0.1") for name in "ab")
    files = KeyPair(certificate=tmp_path / "tls.crt", key=tmp_path / "tls.key")

    def put(certificate: KeyPair, key: KeyPair) -> None:
        shutil.copyfile(key.key, files.key)
        shutil.copyfile(certificate.certificate, files.certificate)

    async def served() -> kopf.WebhookClientConfig:
        async with asyncio.timeout(60):
            return await anext(server)

    (port,) = free_ports(1)
    webhook = of(port, files)
    put(first, second)
    server = reviews_server(webhook, called, check_seconds=0.01)
    waiting = asyncio.create_task(served())
    while "webhook cannot start" not in caplog.text:
        await asyncio.sleep(0)
    put(first, first)
    assert str(port) in str((await waiting).get("url"))
    told = len(caplog.records)
    waiting = asyncio.create_task(served())  # until the files change
    await asyncio.sleep(0.05)
    put(second, first)
    while len(caplog.records) == told:
        await asyncio.sleep(0.01)
    put(second, second)
    await waiting
    await server.aclose()


async def test_only_clients_of_the_named_authority_are_answered(tmp_path: Path) -> None:
    authority, stranger = Authority(tmp_path / "pki"), Authority(tmp_path / "other")
    authority.create()
    stranger.create()
    ours = authority.issue("server", subject="/CN=server", alternative_names="IP:127.0.0.1")
    api_server = authority.issue("client", subject="/CN=kube-apiserver", alternative_names="IP:127.0.0.1")
    other = stranger.issue("client", subject="/CN=kube-apiserver", alternative_names="IP:127.0.0.1")
    (port,) = free_ports(1)
    webhook = of(port, ours, client_ca=authority.pair.certificate)
    server = reviews_server(webhook, called)
    await anext(server)
    try:
        assert await asks(port, authority, api_server) == 200
        for client in (other, None):
            with pytest.raises(aiohttp.ClientError):
                await asks(port, authority, client)
    finally:
        await server.aclose()


async def asks(port: int, authority: Authority, client: KeyPair | None) -> int:
    """Return the status of a review that a client with this certificate requests."""
    tls = ssl.create_default_context(cafile=authority.pair.certificate)
    if client is not None:
        tls.load_cert_chain(client.certificate, client.key)
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls))
    async with session, session.post(f"https://127.0.0.1:{port}/llmdeployments", json={}) as answer:
        return answer.status
