"""Which headers pass through the gateway, and which belong to one hop only (RFC 9110, 7.6.1).

Pure. Under ``proxy``.
"""

from collections.abc import Iterable
from uuid import uuid4

from multidict import CIMultiDict, CIMultiDictProxy

REQUEST_ID = "X-Request-Id"
REPLICA = "X-Quire-Replica"
"""Which replica answered: in a cluster `namespace/pod`. Whoever asks about an answer can say whose log to read."""

_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The body was read whole (and unpacked), so its length and packing are set anew; Expect was answered by us.
_REQUEST_ONLY = _HOP_BY_HOP | {"host", "content-length", "content-encoding", "expect"}
# The length is set by whoever writes the body; the date is that of the answer to our client.
_RESPONSE_ONLY = _HOP_BY_HOP | {"content-length", "date", "server"}
_ID_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.:")
_MAX_ID = 128


def request_id(headers: CIMultiDictProxy[str]) -> str:
    """The client's own id, if it is fit to be logged; else a new one."""
    given = headers.get(REQUEST_ID, "")
    return given if 0 < len(given) <= _MAX_ID and _ID_CHARACTERS.issuperset(given) else uuid4().hex


def to_replica(headers: CIMultiDictProxy[str], *, request_id: str) -> CIMultiDict[str]:
    """What the replica gets to see."""
    passed = _without(headers, _REQUEST_ONLY)
    passed[REQUEST_ID] = request_id
    return passed


def to_client(headers: CIMultiDictProxy[str], *, request_id: str, replica: str) -> CIMultiDict[str]:
    """What the client gets to see."""
    passed = _without(headers, _RESPONSE_ONLY)
    passed[REQUEST_ID] = request_id
    passed[REPLICA] = replica
    return passed


def _without(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    unwanted = named.union(dropped)
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in unwanted)
