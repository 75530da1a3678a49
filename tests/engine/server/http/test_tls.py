"""TLS: unusable files stop the start, a rotation applies to new connections, probes need no certificate."""

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st

from quire_common.certificate import not_after
from quire_common.errors import TlsError
from quire_common.tls import ReloadingTls, TlsFiles

Serving = Callable[..., Any]
END = datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC)
UNSUPPORTED = datetime(2050, 6, 1, 12, 0, tzinfo=UTC)
"""From 2050 on, certificates write years with four digits."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def issue(authority: trustme.CA, folder: Path, end: datetime = END) -> TlsFiles:
    """Return a certificate for this machine, as cert-manager writes it to a Secret."""
    leaf = authority.issue_cert("127.0.0.1", "localhost", not_after=end)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in leaf.cert_chain_pems))
    (folder / "tls.key").write_bytes(leaf.private_key_pem.bytes())
    return TlsFiles(certfile=folder / "tls.crt", keyfile=folder / "tls.key")


def encrypted(key: Path, password: bytes) -> bytes:
    loaded = serialization.load_pem_private_key(key.read_bytes(), None)
    return loaded.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(password),
    )


def trusting(authority: trustme.CA, identity: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    if identity is not None:
        context.load_cert_chain(identity / "tls.crt", identity / "tls.key")
    return context


# --- the files ---


@pytest.mark.parametrize("end", [END, UNSUPPORTED])
def test_certificate_expiry_is_read(authority: trustme.CA, tmp_path: Path, end: datetime) -> None:
    options = issue(authority, tmp_path, end)
    assert ReloadingTls(options, Clock()).certificate_expiry() == end.timestamp()
    certificate = x509.load_pem_x509_certificate(options.certfile.read_bytes())
    assert not_after(certificate.public_bytes(serialization.Encoding.DER)) == certificate.not_valid_after_utc


@given(st.data())
def test_invalid_certificate_raises_value_error(data: st.DataObject) -> None:
    der = bytearray(CERTIFICATE)
    cut = data.draw(st.integers(0, len(der)))
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, len(der) - 1), st.integers(0, 255)), max_size=4)):
        der[place] = value
    with contextlib.suppress(ValueError):
        not_after(bytes(der[:cut]))


CERTIFICATE = ssl.PEM_cert_to_DER_cert(trustme.CA().issue_cert("a.example").cert_chain_pems[0].bytes().decode())


def test_a_pair_in_one_file_and_an_encrypted_key_are_read(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    assert options.keyfile is not None
    both = tmp_path / "both.pem"
    both.write_bytes(options.certfile.read_bytes() + options.keyfile.read_bytes())
    ReloadingTls(TlsFiles(certfile=both), Clock())
    options.keyfile.write_bytes(encrypted(options.keyfile, b"open sesame"))
    (tmp_path / "password").write_text("open sesame\n")
    ReloadingTls(TlsFiles(certfile=both, keyfile=options.keyfile, keyfile_password_file=tmp_path / "password"), Clock())


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda folder: (folder / "tls.crt").unlink(), "--ssl-certfile .* cannot be read: No such file"),
        (lambda folder: (folder / "tls.key").unlink(), "--ssl-keyfile .* cannot be read: No such file"),
        (lambda folder: (folder / "tls.crt").write_text("no"), "do not contain a certificate and its private key"),
        (lambda folder: (folder / "tls.key").write_text("no"), "do not contain a certificate and its private key"),
        (lambda folder: (folder / "tls.key").write_bytes(b"\xff"), "cannot be read: it is not text"),
        (
            lambda folder: (folder / "tls.key").write_bytes(encrypted(folder / "tls.key", b"open sesame")),
            "is encrypted: decrypt it, or set --ssl-keyfile-password-file",
        ),
        (
            lambda folder: (folder / "tls.key").write_bytes(trustme.CA().issue_cert("a").private_key_pem.bytes()),
            "does not belong to the certificate",
        ),
    ],
)
def test_files_that_cannot_be_used_stop_the_start(
    authority: trustme.CA, tmp_path: Path, spoil: Callable[[Path], object], part: str
) -> None:
    options = issue(authority, tmp_path)
    spoil(tmp_path)
    with pytest.raises(TlsError, match=part) as caught:
        ReloadingTls(options, Clock())
    assert caught.value.exit_code == 2


def test_a_wrong_password_and_wrong_authorities_stop_the_start(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    assert options.keyfile is not None
    (tmp_path / "wrong").write_text("wrong")
    with pytest.raises(TlsError, match="contains no certificates in PEM"):
        ReloadingTls(TlsFiles(certfile=options.certfile, keyfile=options.keyfile, ca_certs=tmp_path / "wrong"), Clock())
    options.keyfile.write_bytes(encrypted(options.keyfile, b"open sesame"))
    with pytest.raises(TlsError, match="the password in .* does not open the private key"):
        ReloadingTls(
            TlsFiles(certfile=options.certfile, keyfile=options.keyfile, keyfile_password_file=tmp_path / "wrong"),
            Clock(),
        )


# --- while it serves ---


def swap(link: Path, target: Path) -> None:
    """Replace the link to the folder of files, as a kubelet changes a mounted Secret."""
    fresh = link.with_name("..data_tmp")
    fresh.symlink_to(target)
    os.replace(fresh, link)


async def test_certificate_rotation_applies_to_new_connections(
    serving: Serving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, clock = trustme.CA(), trustme.CA(), Clock()
    issue(first, tmp_path / "1"), issue(second, tmp_path / "2", UNSUPPORTED)
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
        assert float(line.rpartition(" ")[2]) == UNSUPPORTED.timestamp()
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
    tls = ReloadingTls(
        TlsFiles(certfile=options.certfile, keyfile=options.keyfile, ca_certs=tmp_path / "clients.pem"), Clock()
    )
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
    tls = ReloadingTls(issue(authority, tmp_path), Clock())
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
    options, clock = issue(authority, tmp_path / "server"), Clock()
    before, after = trustme.CA(), trustme.CA()
    issue(before, tmp_path / "client")
    trusted = tmp_path / "clients.pem"
    before.cert_pem.write_to_path(str(trusted))
    tls = ReloadingTls(TlsFiles(certfile=options.certfile, keyfile=options.keyfile, ca_certs=trusted), clock)
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


def test_files_deleted_during_reload_keep_the_server_running(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, clock = issue(authority, tmp_path), Clock()
    tls = ReloadingTls(options, clock)
    before = tls.certificate_expiry()
    issue(authority, tmp_path, UNSUPPORTED)
    clock.now = 2.0

    def vanished(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", vanished)
    assert tls.certificate_expiry() == before and "keeping the previous certificate" in caplog.text
