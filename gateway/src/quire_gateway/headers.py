"""The headers that pass through the gateway; those of one hop do not (RFC 9110, 7.6.1). Under ``proxy``."""

from collections.abc import Iterable
from uuid import uuid4

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy

from quire_common.contract.engine import RESUMABLE_HEADER, USAGE_HEADER
from quire_common.contract.gateway import ENGINE_KEY_HEADER, TENANT_HEADER, WAIT_COMMENTS_HEADER
from quire_gateway.tenants import TENANT

SERVER = "quire-gateway"
REQUEST_ID = "X-Request-Id"
FORWARDED_FOR = "X-Forwarded-For"
REPLICA = "X-Quire-Replica"
"""The replica that answered, in a cluster `namespace/pod`: it names the log to read about an answer."""

# Those of one hop. The gateway read and decompressed the whole body, so it sets the length and encoding; it answered
# Expect itself. Cookies are those of the address that all models share, for example of a login in front of the gateway.
# fmt: off
_REQUEST_ONLY = frozenset({
    "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
    "transfer-encoding", "upgrade", "host", "content-length", "content-encoding", "expect", "cookie",
    "x-quire-trial",  # engines of older releases refuse some requests with it
}).union(map(str.lower, (TENANT_HEADER, ENGINE_KEY_HEADER, USAGE_HEADER, RESUMABLE_HEADER, WAIT_COMMENTS_HEADER)))
_ANSWER = frozenset({
    "cache-control", "content-encoding", "content-type", "endpoint-load-metrics", "retry-after", "retry-after-ms",
    "traceparent", "tracestate", "x-accel-buffering", "x-should-retry",
})
# fmt: on
"""The headers of a replica's answer that clients get. All models share the address of the gateway, so none of them may
set cookies there, admit other sites, redirect clients or instruct a proxy."""
_KEYS = frozenset({"authorization", "x-api-key", "api-key"})
"""The headers in which clients send keys. A gateway that checks keys passes on none of them."""
_ANSWER_PREFIXES = ("x-quire-", "x-ratelimit-")
"""The beginnings of further ones."""
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_MAX_ID = 128


_ID = web.RequestKey("id", str)
"""The key under which a request stores its id, so that the replica, the log and an error name the same one."""


def request_id(request: web.BaseRequest) -> str:
    """Return the client's own request id if it is safe to log, else one that is generated at the first call."""
    if _ID not in request:
        given = request.headers.get(REQUEST_ID, "")
        is_safe = 0 < len(given) <= _MAX_ID and _ID_CHARACTERS.issuperset(given)
        request[_ID] = given if is_safe else uuid4().hex
    return request[_ID]


def to_replica(request: web.BaseRequest, *, audience: str, request_id: str) -> CIMultiDict[str]:
    """Return the headers of the request to a replica of this audience (``Pool.audience``)."""
    tenant = request.get(TENANT)
    passed = _without(request.headers, _REQUEST_ONLY if tenant is None else _REQUEST_ONLY | _KEYS)
    passed[REQUEST_ID] = request_id
    if tenant is not None:
        passed[TENANT_HEADER] = tenant.value_for(audience)
    if engine_key := request.headers.get(ENGINE_KEY_HEADER, ""):
        passed["Authorization"] = f"Bearer {engine_key}"
    # An engine on this host must not take a client of the gateway for one on this host.
    hops = [*passed.getall(FORWARDED_FOR, ()), request.remote or "unknown"]
    passed[FORWARDED_FOR] = ", ".join(hops)
    return passed


def to_client(headers: CIMultiDictProxy[str], *, request_id: str, replica: str | None) -> CIMultiDict[str]:
    """Return the headers of the answer to the client; without a name of the replica, that stays hidden."""
    passed = CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if (lower := name.lower()) in _ANSWER or lower.startswith(_ANSWER_PREFIXES)
    )
    if "WWW-Authenticate" in headers:
        # Other schemes let browsers ask for a password of this address.
        passed["WWW-Authenticate"] = "Bearer"
    # A browser must neither run an answer as a page of this address nor guess that it is one.
    passed["Content-Security-Policy"] = "sandbox"
    passed["X-Content-Type-Options"] = "nosniff"
    passed[REQUEST_ID] = request_id
    passed.pop(REPLICA, None)
    if replica is not None:
        passed[REPLICA] = replica
    return passed


def _without(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    unwanted = named.union(dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in unwanted)
