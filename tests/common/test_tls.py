"""The TLS files of a listener: unusable ones stop the start, and a failed reload keeps the previous certificate."""

import contextlib
import ssl
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from hypothesis import given
from hypothesis import strategies as st
from set_clock import SetClock
from tls_files import END, LATE_END, encrypted, issue

from quire_common.errors import TlsError
from quire_common.tls import ReloadingTls, TlsFiles, not_after


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.mark.parametrize("end", [END, LATE_END])
def test_certificate_expiry_is_read(authority: trustme.CA, tmp_path: Path, end: datetime) -> None:
    options = issue(authority, tmp_path, end)
    assert ReloadingTls(options, SetClock()).certificate_expiry() == end.timestamp()
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
    ReloadingTls(TlsFiles(certfile=both), SetClock())
    options.keyfile.write_bytes(encrypted(options.keyfile, b"open sesame"))
    (tmp_path / "password").write_text("open sesame\n")
    ReloadingTls(replace(options, certfile=both, keyfile_password_file=tmp_path / "password"), SetClock())


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda folder: (folder / "tls.crt").unlink(), "--ssl-certfile .* cannot be read: No such file"),
        (lambda folder: (folder / "tls.key").unlink(), "--ssl-keyfile .* cannot be read: No such file"),
        (lambda folder: (folder / "tls.crt").write_text("no"), "do not contain a certificate and its private key"),
        (lambda folder: (folder / "tls.key").write_text("no"), "do not contain a certificate and its private key"),
        (lambda folder: (folder / "tls.key").write_bytes(b"\xff"), "--ssl-keyfile .* cannot be read: it is not text"),
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
        ReloadingTls(options, SetClock())
    assert caught.value.exit_code == 2


def test_a_wrong_password_and_wrong_authorities_stop_the_start(authority: trustme.CA, tmp_path: Path) -> None:
    options = issue(authority, tmp_path)
    assert options.keyfile is not None
    (tmp_path / "wrong").write_text("wrong")
    with pytest.raises(TlsError, match="contains no certificates in PEM"):
        ReloadingTls(replace(options, ca_certs=tmp_path / "wrong"), SetClock())
    options.keyfile.write_bytes(encrypted(options.keyfile, b"open sesame"))
    with pytest.raises(TlsError, match="the password in .* does not open the private key"):
        ReloadingTls(replace(options, keyfile_password_file=tmp_path / "wrong"), SetClock())


def test_files_deleted_during_reload_keep_the_server_running(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    options, clock = issue(authority, tmp_path), SetClock()
    tls = ReloadingTls(options, clock)
    before = tls.certificate_expiry()
    issue(authority, tmp_path, LATE_END)
    clock.now = 2.0

    def vanished(*_: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", vanished)
    assert tls.certificate_expiry() == before and "keeping the previous certificate" in caplog.text
