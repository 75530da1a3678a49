"""Authentication: which API key opens which route."""

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers

from quire_common.contract.adapters_file import ADAPTERS_PATH
from quire_common.contract.gateway import ENGINE_KEY_HEADER, TENANT_HEADER, TENANT_VALUE
from quire_common.key_file import FixedKeys, Key, KeyFile, api_token
from quire_common.rate_limits import Allowance, Allowances
from quire_engine.api.tracing import Span
from quire_engine.config import AccessOptions
from quire_engine.errors import Forbidden, InvalidRequest, Overloaded, Unauthorized

PROBES = frozenset({"/livez", "/readyz"})
METRICS_PATHS = frozenset({"/metrics", ADAPTERS_PATH})
"""The reports, which the keys of --metrics-key-file open."""
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""The routes outside of /admin that the keys of --admin-key-file open."""
_PROXY_HEADERS = ("x-forwarded-for", "forwarded", "x-real-ip")
"""Headers with which proxies name the original client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a client, which the edge has established before a route sees the request."""

    tenant: str | None = None
    """The name of the API key, or what a gateway stated where no key is needed. It decides about fair sharing."""
    gateway_tenant: str | None = None
    """The tenant of a gateway among the clients of one API key, whose prefixes are kept apart, too."""
    allowance: Allowance | None = None
    """The rate limits of the tenant; None where its key has none."""
    span: Span | None = None
    """The span of the request; None where nothing is traced."""


ANONYMOUS = Identity()


class Access:
    """The access rules of one server.

    With ``certificates`` every path except the probes needs a client certificate that TLS trusts. With ``local`` every
    client is on this host, because the socket is a file. Raises KeyFileError if a key file cannot be used.
    """

    def __init__(
        self, options: AccessOptions, now: Callable[[], float], *, certificates: bool = False, local: bool = False
    ) -> None:
        def load(file: Path | None, *, limits: bool = False) -> KeyFile | None:
            reason = None if limits else "only the keys of --api-key-file can have limits"
            return None if file is None else KeyFile(file, now, no_limits=reason)

        self._certificates = certificates
        self._local = local
        self._api = FixedKeys(options.api_keys) if options.api_keys else load(options.api_key_file, limits=True)
        self._admin = load(options.admin_key_file)
        self._metrics = load(options.metrics_key_file)
        self._allowances = Allowances(now, limited=Overloaded, oversized=_oversized)

    def check(self, path: str, headers: Headers, client_host: str | None, *, certified: bool = False) -> Identity:
        """Return the identity behind a request. Raises Unauthorized or Forbidden."""
        if path in PROBES:
            return ANONYMOUS
        if self._certificates and not certified:
            raise Unauthorized(
                "a client certificate is required, signed by an authority that this server trusts",
                code="missing_client_certificate",
            )
        if path in METRICS_PATHS:
            return _identity(self._metrics, headers)
        if path.startswith("/admin/") or path in ADMIN_PATHS:
            if self._admin is None and (_is_forwarded(headers) or not self._is_on_this_host(client_host)):
                raise Forbidden(
                    f"{path} is open to clients on this host only; start the server with --admin-key-file to open it"
                )
            return _identity(self._admin, headers)
        stated = _stated_tenant(headers)
        if self._api is None:
            return ANONYMOUS if stated is None else Identity(tenant=stated)
        key = _matching_key(self._api, headers)
        return Identity(tenant=key.tenant, gateway_tenant=stated, allowance=self._allowances.of(key))

    def _is_on_this_host(self, client_host: str | None) -> bool:
        return self._local or (client_host is not None and _is_loopback(client_host))


def _oversized(sequences: int, share: int, *, limit: int, num_servers: int) -> InvalidRequest:
    return InvalidRequest(
        f"{sequences} sequences (prompts times n) exceed the {share} concurrent sequences of this API key; send them "
        "in several requests"
    )


def _identity(keys: KeyFile | None, headers: Headers) -> Identity:
    return ANONYMOUS if keys is None else Identity(tenant=_matching_key(keys, headers).tenant)


def _matching_key(keys: KeyFile | FixedKeys, headers: Headers) -> Key:
    token = api_token(headers.get("authorization", ""), headers.get("x-api-key", ""))
    if token is None and TENANT_HEADER in headers:
        raise Unauthorized(
            "this model requires an API key of its own, in addition to that of the gateway: send it in the header "
            f"{ENGINE_KEY_HEADER}: KEY",
            code="missing_api_key",
        )
    if token is None:
        raise Unauthorized(
            "send an API key in the header Authorization: Bearer KEY or x-api-key: KEY", code="missing_api_key"
        )
    key = keys.find(token)
    if key is None:
        raise Unauthorized("this API key is unknown")
    return key


def _stated_tenant(headers: Headers) -> str | None:
    """Return the tenant that a gateway states; a client may invent a value, but cannot compute that of another one."""
    stated = headers.get(TENANT_HEADER)
    if stated is not None and not re.fullmatch(TENANT_VALUE, stated):
        raise InvalidRequest(f"{TENANT_HEADER}: expected 64 hexadecimal digits, which a gateway with API keys computes")
    return stated


def _is_forwarded(headers: Headers) -> bool:
    return any(name in headers for name in _PROXY_HEADERS)


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    # A socket for both versions of IP shows an IPv4 client as ::ffff:127.0.0.1.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
