"""TLS of the server: a rotation applies to new connections, and probes need no certificate."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from set_clock import SetClock
from tls_files import LATE_END, issue, trusting

from quire_common.tls import ReloadingTls, TlsFiles

Serving = Callable[..., Any]


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def swap(link: Path, target: Path) -> None:
    """Replace the link to the folder of files, as a kubelet changes a mounted Secret."""
    fresh = link.with_name("..data_tmp")
    fresh.symlink_to(target)
    os.replace(fresh, link)


async def test_certificate_rotation_applies_to_new_connections(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, clock = trustme.CA(), trustme.CA(), SetClock()
    issue(first, tmp_path / "1"), issue(second, tmp_path / "2", LATE_END)
    mounted = tmp_path / "..data"
    mounted.symlink_to(tmp_path / "1")
    tls = ReloadingTls(TlsFiles(certfile=mounted / "tls.crt", keyfile=mounted / "tls.key"), clock)
    async with (
        serving("ok", tls=tls) as server,
        httpx.AsyncClient(base_url=server.address, verify=trusting(first)) as old,
        httpx.AsyncClient(base_url=server.address, verify=trusting(second)) as new,
    ):
        assert (await old.get("/readyz")).status_code == 200
        with pytest.raises(httpx.ConnectError):
            await new.get("/readyz")
        swap(mounted, tmp_path / "2")
        clock.now = 2.0
        assert (await new.get("/readyz")).status_code == 200
        assert (await old.get("/readyz")).status_code == 200  # on its existing connection
        metrics = (await new.get("/metrics")).text
        (line,) = [
            line for line in metrics.splitlines() if line.startswith("quire_tls_certificate_expiry_timestamp_seconds{")
        ]
        assert float(line.rpartition(" ")[2]) == LATE_END.timestamp()
        (tmp_path / "2" / "tls.key").write_text("half of a key")
        clock.now = 4.0
        async with httpx.AsyncClient(base_url=server.address, verify=trusting(second)) as later:
            assert (await later.get("/readyz")).status_code == 200
        assert "keeping the previous certificate" in caplog.text


async def test_clients_without_a_certificate_reach_the_probes_only(
    serving: Serving, tmp_path: Path, authority: trustme.CA
) -> None:
    options = issue(authority, tmp_path / "server")
    clients, strangers = trustme.CA(), trustme.CA()
    clients.cert_pem.write_to_path(str(tmp_path / "clients.pem"))
    issue(clients, tmp_path / "client"), issue(strangers, tmp_path / "stranger")
    tls = ReloadingTls(replace(options, ca_certs=tmp_path / "clients.pem"), SetClock())
    async with serving("ok", tls=tls) as server:

        async def statuses(identity: str | None) -> list[int]:
            context = trusting(authority, None if identity is None else tmp_path / identity)
            async with httpx.AsyncClient(base_url=server.address, verify=context) as http:
                return [(await http.get(path)).status_code for path in ("/livez", "/readyz", "/v1/models", "/metrics")]

        assert await statuses("client") == [200, 200, 200, 200]
        assert await statuses(None) == [200, 200, 401, 401]
        with pytest.raises((httpx.ConnectError, httpx.ReadError)):
            await statuses("stranger")


async def test_plain_http_on_tls_port_closes_that_connection_only(
    serving: Serving, tmp_path: Path, authority: trustme.CA
) -> None:
    tls = ReloadingTls(issue(authority, tmp_path), SetClock())
    async with serving("ok", tls=tls) as server:
        host, _, port = server.address.removeprefix("https://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /livez HTTP/1.1\r\n\r\n")
        assert b"200" not in await asyncio.wait_for(reader.read(), 60)
        writer.close()
        async with httpx.AsyncClient(base_url=server.address, verify=trusting(authority)) as http:
            body = {"model": "demo", "prompt": "Hi", "stream": True}
            assert (await http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")


async def test_a_client_of_a_removed_authority_cannot_resume(
    serving: Serving, tmp_path: Path, authority: trustme.CA
) -> None:
    options, clock = issue(authority, tmp_path / "server"), SetClock()
    before, after = trustme.CA(), trustme.CA()
    issue(before, tmp_path / "client")
    trusted = tmp_path / "clients.pem"
    before.cert_pem.write_to_path(str(trusted))
    tls = ReloadingTls(replace(options, ca_certs=trusted), clock)
    context = trusting(authority, tmp_path / "client")
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    async with serving("ok", tls=tls) as server:
        host, _, port = server.address.removeprefix("https://").partition(":")

        def ask(session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
            with (
                socket.create_connection((host, int(port)), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname=host, session=session) as connection,
            ):
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                answer = connection.recv(1000)
                return answer, connection.session

        answer, session = await asyncio.to_thread(ask, None)
        assert answer.startswith(b"HTTP/1.1 200 ")
        trusted.unlink()
        after.cert_pem.write_to_path(str(trusted))
        clock.now = 2.0
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            answer, _ = await asyncio.to_thread(ask, session)
            assert answer == b""
