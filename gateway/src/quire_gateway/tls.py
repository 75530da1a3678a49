"""TLS for the listener: certificate and key from files, read again when they change.

Joined to the listener by ``__main__``. A new connection gets what the files hold by then, open ones keep theirs. Files
that can't be used are logged, and what was read before stays: a mistake in a rotation ends nothing.
"""

import logging
import ssl
from collections.abc import Callable

from quire_gateway.config import TlsOptions
from quire_gateway.errors import ConfigProblem
from quire_gateway.watched_files import WatchedFiles

_log = logging.getLogger(__name__)


class Tls:
    """Raises ``ConfigProblem`` when made, if the files can't be used."""

    def __init__(self, options: TlsOptions, now: Callable[[], float]) -> None:
        self._options = options
        self._watched = WatchedFiles((options.certfile, options.key), now)
        self._context = _read(options)
        self.listener_context = self._context
        """For the listening socket; each handshake is then handed to the context of the day."""
        self.listener_context.sni_callback = self._hand_over

    def _hand_over(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        # OpenSSL calls this in every handshake, whether or not the client names a server.
        self._refresh()
        connection.context = self._context

    def _refresh(self) -> None:
        if not self._watched.changed():
            return
        try:
            self._context = _read(self._options)
            _log.info("read the certificate again from %s", self._options.certfile)
        except ConfigProblem as problem:
            _log.error("the certificate stays as it was: %s", problem)


def _read(options: TlsOptions) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    for flag, file in (("--ssl-certfile", options.certfile), ("--ssl-keyfile", options.key)):
        try:
            file.read_bytes()
        except OSError as error:
            raise ConfigProblem([f"{flag} {file} cannot be read: {error.strerror}"]) from error
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(options.certfile, options.key, password="")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigProblem([_explanation(error, options)]) from error
    return context


def _explanation(error: Exception, options: TlsOptions) -> str:
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"the private key in {options.key} does not belong to the certificate in {options.certfile}"
    if "ENCRYPTED" in options.key.read_text(encoding="utf-8", errors="replace"):
        return f"the private key in {options.key} is encrypted; the gateway needs it in the clear"
    return f"{options.certfile} and {options.key} do not hold a certificate and its private key in PEM"
