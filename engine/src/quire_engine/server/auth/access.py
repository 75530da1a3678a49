"""Which key opens which route. Every path needs one but the probes; without a key file its group is open.

``/admin`` without its own file answers this host only: stopping an engine must not be anyone's. What a proxy passes on
is not of this host, wherever the proxy runs.
"""

import ipaddress
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers

from quire_common.key_file import UNLIMITED, Key, KeyFile, bearer_token
from quire_engine.config import AccessOptions
from quire_engine.errors import Forbidden, Unauthorized
from quire_engine.server.auth.allowance import Allowance
from quire_engine.server.observability.tracing import Span

PROBES = frozenset({"/livez", "/readyz"})
_PASSED_ON = ("x-forwarded-for", "forwarded", "x-real-ip")
"""Headers by which proxies tell for whom they ask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks: what the edge learnt of a request before any route saw it."""

    tenant: str | None = None
    """The name of the key; None where no key is needed."""
    allowance: Allowance | None = None
    """None where the key has no limits."""
    span: Span | None = None
    """None where nothing is traced."""


ANYBODY = Caller()


class Access:
    """Raises KeyFileError when made, if a file cannot be used.

    With ``certificates`` every path but the probes is for clients only that showed a certificate TLS trusts. With
    ``local`` every client is on this host, since the socket is a file.
    """

    def __init__(
        self, options: AccessOptions, now: Callable[[], float], *, certificates: bool = False, local: bool = False
    ) -> None:
        def load(file: Path | None, *, limits: bool = False) -> KeyFile | None:
            return None if file is None else KeyFile(file, now, limits=limits)

        self._now = now
        self._certificates = certificates
        self._local = local
        self._api = load(options.api_key_file, limits=True)
        self._admin = load(options.admin_key_file)
        self._metrics = load(options.metrics_key_file)
        self._allowances: dict[str, Allowance] = {}
        """By tenant; of those that had limits."""

    def check(self, path: str, headers: Headers, client_host: str | None, *, certified: bool = False) -> Caller:
        """Whose request it is. Raises Unauthorized or Forbidden."""
        if path in PROBES:
            return ANYBODY
        if self._certificates and not certified:
            raise Unauthorized(
                "show a client certificate that is signed by an authority this server trusts",
                code="missing_client_certificate",
            )
        if path == "/metrics":
            return _caller(self._metrics, headers)
        if path.startswith("/admin/"):
            if self._admin is None and (_passed_on(headers) or not self._is_of_this_host(client_host)):
                raise Forbidden("/admin answers this host only; start with --admin-key-file to open it to others")
            return _caller(self._admin, headers)
        if self._api is None:
            return ANYBODY
        return self._limited(_matching(self._api, headers))

    def _is_of_this_host(self, client_host: str | None) -> bool:
        return self._local or (client_host is not None and _is_loopback(client_host))

    def _limited(self, key: Key) -> Caller:
        """With the allowance of its tenant, as the key's limits are now."""
        allowance = self._allowances.get(key.tenant)
        if allowance is None:
            if key.limits == UNLIMITED:
                return Caller(tenant=key.tenant)
            allowance = self._allowances[key.tenant] = Allowance(key.tenant, key.limits, self._now)
        allowance.limits = key.limits
        return Caller(tenant=key.tenant, allowance=allowance)


def _caller(keys: KeyFile | None, headers: Headers) -> Caller:
    return ANYBODY if keys is None else Caller(tenant=_matching(keys, headers).tenant)


def _matching(keys: KeyFile, headers: Headers) -> Key:
    token = bearer_token(headers.get("authorization", ""))
    if token is None:
        raise Unauthorized("send an API key in the header Authorization: Bearer KEY", code="missing_api_key")
    key = keys.find(token)
    if key is None:
        raise Unauthorized("this API key is unknown")
    return key


def _passed_on(headers: Headers) -> bool:
    return any(name in headers for name in _PASSED_ON)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket for both versions of IP shows an IPv4 client as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
