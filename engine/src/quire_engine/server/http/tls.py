"""TLS for the listener: certificate, key and client authorities from files, read again when they change.

A new connection gets what the files hold by then; connections that are open keep theirs. Files that cannot be used are
logged, and what was read before stays: a mistake in a rotation ends nothing.
"""

import logging
import re
import ssl
from collections.abc import Callable
from pathlib import Path

from quire_engine.config import TlsOptions
from quire_engine.errors import TlsError
from quire_engine.server.auth.watched_files import WatchedFiles
from quire_engine.server.http.certificate import not_after

_log = logging.getLogger(__name__)

_FIRST_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


class Tls:
    """Raises TlsError when made, if the files cannot be used."""

    def __init__(self, options: TlsOptions, now: Callable[[], float]) -> None:
        self._options = options
        self._watched = WatchedFiles(_files(options), now)
        self._context, self._expiry = _read(options)
        self.listener_context = self._context
        """For the listening socket; each handshake is then handed to the context of the day."""
        self.listener_context.sni_callback = self._hand_over

    @property
    def asks_for_certificates(self) -> bool:
        """Whether clients must show one."""
        return self._options.ca_certs is not None

    def certificate_expiry(self) -> float:
        """When the certificate that new connections get ends, in Unix seconds."""
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
            self._context, self._expiry = _read(self._options)
            _log.info("read the certificate again from %s", self._options.certfile)
        except TlsError as error:
            _log.error("the certificate stays as it was: %s", error)


def _files(options: TlsOptions) -> tuple[Path, ...]:
    named = (options.certfile, options.keyfile, options.keyfile_password_file, options.ca_certs)
    return tuple(file for file in named if file is not None)


def _read(options: TlsOptions) -> tuple[ssl.SSLContext, float]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load_pair(context, options)
    if options.ca_certs is not None:
        _text(options.ca_certs, "ssl-ca-certs")
        try:
            context.load_verify_locations(cafile=options.ca_certs)
        except OSError as error:
            raise TlsError(f"--ssl-ca-certs {options.ca_certs} holds no certificates in PEM") from error
        # Optional for OpenSSL, so that a kubelet's probes come through; ``access`` asks all others for one.
        context.verify_mode = ssl.CERT_OPTIONAL
        # A resumed session brings its client's certificate along, trusted still or not. TLS 1.2 cannot be kept from it
        # here: there an authority that is taken out is done with two hours later, or with the process.
        context.num_tickets = 0
    return context, _expiry(options.certfile)


def _load_pair(context: ssl.SSLContext, options: TlsOptions) -> None:
    _text(options.certfile, "ssl-certfile")
    key = options.keyfile or options.certfile
    _text(key, "ssl-keyfile" if options.keyfile else "ssl-certfile")
    password = None
    if options.keyfile_password_file is not None:
        password = _text(options.keyfile_password_file, "ssl-keyfile-password-file").rstrip("\r\n")
    asked = False

    def tell_password() -> str:
        nonlocal asked
        asked = True
        return password or ""

    try:
        # Without a function OpenSSL would ask for the password on the terminal.
        context.load_cert_chain(options.certfile, key, tell_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise TlsError(_explanation(error, options, asked=asked)) from error


def _explanation(error: Exception, options: TlsOptions, *, asked: bool) -> str:
    key = options.keyfile or options.certfile
    if asked:
        if options.keyfile_password_file is None:
            return f"the private key in {key} is encrypted; its password goes into --ssl-keyfile-password-file"
        return f"the password in {options.keyfile_password_file} does not open the private key in {key}"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {key} does not belong to the certificate in {options.certfile}"
    return f"{options.certfile} and {key} do not hold a certificate and its private key in PEM"


def _expiry(certfile: Path) -> float:
    match = _FIRST_CERTIFICATE.search(_text(certfile, "ssl-certfile"))
    if match is None:
        raise TlsError(f"{certfile} holds no certificate in PEM")
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
