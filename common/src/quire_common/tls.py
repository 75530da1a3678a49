"""TLS for a listener: certificate, private key and client authorities from files, reloaded when they change."""

import logging
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from quire_common.errors import TlsError
from quire_common.watched_files import WatchedFiles

_SEQUENCE, _VERSION = 0x30, 0xA0
_UTC_TIME, _GENERALIZED_TIME = 0x17, 0x18


class _Element(NamedTuple):
    tag: int
    start: int
    end: int


def not_after(der: bytes) -> datetime:
    """Return when the certificate expires. Raise ValueError if this is not a certificate."""
    try:
        certificate = _expect(der, 0, _SEQUENCE)
        body = _expect(der, certificate.start, _SEQUENCE)
        field = _element(der, body.start)
        if field.tag == _VERSION:
            field = _element(der, field.end)
        for _ in ("signature", "issuer", "validity"):
            field = _expect(der, field.end, _SEQUENCE)
        not_before = _element(der, field.start)
        return _time(der, _element(der, not_before.end))
    except IndexError:
        raise ValueError("the certificate is truncated") from None


def _element(der: bytes, at: int) -> _Element:
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:  # then the length is in this many bytes
        count = length & 0x7F
        length = int.from_bytes(der[start : start + count], "big")
        start += count
    return _Element(tag, start, start + length)


def _expect(der: bytes, at: int, tag: int) -> _Element:
    found = _element(der, at)
    if found.tag != tag:
        raise ValueError(f"not a certificate: expected tag {tag:#x}, got {found.tag:#x}")
    return found


def _time(der: bytes, element: _Element) -> datetime:
    text = der[element.start : element.end].decode("ascii")
    if element.tag == _UTC_TIME:
        text = ("20" if int(text[:2]) < 50 else "19") + text
    elif element.tag != _GENERALIZED_TIME:
        raise ValueError(f"not a certificate: expected a time, got tag {element.tag:#x}")
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC)


_log = logging.getLogger(__name__)

_FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files of a listener's TLS, in PEM."""

    certfile: Path
    keyfile: Path | None = None
    """None where the certificate's file contains the key too."""
    keyfile_password_file: Path | None = None
    """None where the key is not encrypted."""
    ca_certs: Path | None = None
    """Authorities that must have signed a client's certificate; None asks clients for none."""

    @property
    def key(self) -> Path:
        """The file with the private key."""
        return self.keyfile or self.certfile


class ReloadingTls:
    """The TLS context of a listener, which follows its files."""

    def __init__(self, files: TlsFiles, now: Callable[[], float]) -> None:
        """Read the files; raise ``TlsError`` if they cannot be used."""
        self._files = files
        named = (files.certfile, files.keyfile, files.keyfile_password_file, files.ca_certs)
        self._watched = WatchedFiles(tuple(file for file in named if file is not None), now)
        self._context, self._expiry = _read(files)
        self.listener_context = self._context
        """The context for the listening socket, which hands each handshake over to the current context."""
        self.listener_context.sni_callback = self._hand_over

    @property
    def asks_for_certificates(self) -> bool:
        """True if clients must show a certificate."""
        return self._files.ca_certs is not None

    def certificate_expiry(self) -> float:
        """Return when the certificate of new connections expires, in Unix seconds."""
        self._refresh()
        return self._expiry

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this in every handshake, whether or not the client names a server.
        self._refresh()
        connection.context = self._context

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._context, self._expiry = _read(self._files)
            _log.info("reloaded the TLS certificate from %s", self._files.certfile)
        except TlsError as error:
            _log.error("TLS certificate reload failed, keeping the previous certificate: %s", error)


def _read(files: TlsFiles) -> tuple[ssl.SSLContext, float]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, files)
    if files.ca_certs is not None:
        _text(files.ca_certs, "ssl-ca-certs")
        try:
            context.load_verify_locations(cafile=files.ca_certs)
        except OSError as error:
            raise TlsError(f"--ssl-ca-certs {files.ca_certs} contains no certificates in PEM") from error
        # Optional for OpenSSL, so that a kubelet's probes come through; the server asks all other clients for one.
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session brings its client's certificate along, still trusted or not. TLS 1.2 has no switch for this
        # here: there a removed authority stays trusted for up to two hours, or until the process ends.
        context.num_tickets = 0
    return context, _expiry(files.certfile)


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    _text(files.certfile, "ssl-certfile")
    _text(files.key, "ssl-keyfile" if files.keyfile else "ssl-certfile")
    password = None
    if files.keyfile_password_file is not None:
        password = _text(files.keyfile_password_file, "ssl-keyfile-password-file").rstrip("\r\n")
    is_encrypted = False

    def read_password() -> str:
        nonlocal is_encrypted
        is_encrypted = True
        return password or ""

    try:
        # Without a function OpenSSL would ask for the password on the terminal.
        context.load_cert_chain(files.certfile, files.key, read_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise TlsError(_explanation(error, files, is_encrypted=is_encrypted)) from error


def _explanation(error: Exception, files: TlsFiles, *, is_encrypted: bool) -> str:
    if is_encrypted and files.keyfile_password_file is not None:
        return f"the password in {files.keyfile_password_file} does not open the private key in {files.key}"
    if is_encrypted:
        return f"the private key in {files.key} is encrypted: decrypt it, or set --ssl-keyfile-password-file"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {files.key} does not belong to the certificate in {files.certfile}"
    return f"{files.certfile} and {files.key} do not contain a certificate and its private key in PEM"


def _expiry(certfile: Path) -> float:
    match = _FIRST_CERTIFICATE.search(_text(certfile, "ssl-certfile"))
    if match is None:
        raise TlsError(f"{certfile} contains no certificate in PEM")
    try:
        return not_after(ssl.PEM_cert_to_DER_cert(match[0])).timestamp()
    except ValueError as error:
        raise TlsError(f"the first certificate in {certfile} cannot be read: {error}") from error


def _text(file: Path, flag: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TlsError(f"--{flag} {file} cannot be read: {reason}") from error
