"""The ids of stored responses. An id names the replica that keeps the response, so that any gateway finds it.

The gateway sends a replica its tag with each request; the replica begins the id of the response with it (ADR 0084).
"""

import hashlib
import re
import secrets

REPLICA_TAG_HEADER = "X-Quire-Replica-Tag"
"""The request header in which the gateway names the replica."""
_ID = re.compile(r"resp_(?:([0-9a-f]{12})_)?[0-9a-f]{48}")
_TAG = re.compile(r"[0-9a-f]{12}")


def replica_tag(endpoint_id: str) -> str:
    """Return the tag of a replica, which does not reveal its name."""
    return hashlib.sha256(endpoint_id.encode()).hexdigest()[:12]


def new_response_id(tag: str | None) -> str:
    """Return a new id, which cannot be guessed; a tag in another form than ``replica_tag`` gives it is ignored."""
    prefix = f"{tag}_" if tag is not None and _TAG.fullmatch(tag) else ""
    return f"resp_{prefix}{secrets.token_hex(24)}"


def tag_of(response_id: str) -> str | None:
    """Return the tag in an id; None if it has none, or is no id of a response."""
    found = _ID.fullmatch(response_id)
    return None if found is None else found[1]
