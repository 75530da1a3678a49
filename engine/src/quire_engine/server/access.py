"""Which key opens which route. Every path needs one but the probes; without a key file its group is open.

``/admin`` without its own file answers this host only: stopping an engine must not be anyone's.
"""

import ipaddress
from collections.abc import Callable

from starlette.datastructures import Headers

from quire_engine.config import AccessOptions
from quire_engine.errors import Forbidden, Unauthorized
from quire_engine.server.keys import Key, KeyFile

PROBES = frozenset({"/livez", "/readyz"})


class Access:
    """Raises KeyFileError when made, if a file cannot be used."""

    def __init__(self, options: AccessOptions, now: Callable[[], float]) -> None:
        def load(file: object) -> KeyFile | None:
            return None if file is None else KeyFile(file, now)  # type: ignore[arg-type]

        self._api = load(options.api_key_file)
        self._admin = load(options.admin_key_file)
        self._metrics = load(options.metrics_key_file)

    def check(self, path: str, headers: Headers, client_host: str | None) -> Key | None:
        """The key that was sent, where one is needed. Raises Unauthorized or Forbidden."""
        if path in PROBES:
            return None
        if path == "/metrics":
            return None if self._metrics is None else _matching(self._metrics, headers)
        if path.startswith("/admin/"):
            if self._admin is None:
                _require_this_host(client_host)
                return None
            return _matching(self._admin, headers)
        return None if self._api is None else _matching(self._api, headers)


def _matching(keys: KeyFile, headers: Headers) -> Key:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthorized("send your API key in the header: Authorization: Bearer KEY", code="missing_api_key")
    key = keys.find(token.strip())
    if key is None:
        raise Unauthorized("this API key is not known here")
    return key


def _require_this_host(client_host: str | None) -> None:
    try:
        local = client_host is not None and ipaddress.ip_address(client_host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise Forbidden("/admin answers this host only; start with --admin-key-file to open it to others")
