"""What the API server was asked, from its own audit log: the only witness of how many writes a client really made.

The server logs a request twice. The first entry is in the file before the request is carried out, so whatever a client
has had an answer to is here; the second adds the status and, for writes, the body sent.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MUTATING_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
# "create" there is a question or a credential; nothing is kept.
UNKEPT_GROUPS: Final = frozenset({"authentication.k8s.io", "authorization.k8s.io"})
UNKEPT_RESOURCES: Final = frozenset({"serviceaccounts/token"})
_JSON_LEVELS: Final = 20_000

POLICY: Final = json.dumps(
    {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "rules": [
            {"level": "Metadata", "resources": [{"group": "", "resources": ["secrets", "serviceaccounts/token"]}]},
            {"level": "Metadata", "resources": [{"group": "coordination.k8s.io", "resources": ["leases"]}]},
            {"level": "Request", "verbs": sorted(MUTATING_VERBS)},
            {"level": "Metadata"},
        ],
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A place in the log: what came after it is newer."""

    offset: int


START: Final = Position(offset=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditedRequest:
    audit_id: str
    user: str
    user_agent: str
    verb: str
    uri: str
    group: str
    resource: str  # with its subresource: deployments/scale
    namespace: str | None
    name: str | None
    received: str  # RFC 3339, microseconds, UTC
    status: int | None  # None while it is not answered
    body: Any  # None for reads, and for what must not be logged
    is_forbidden: bool = False  # by RBAC; quotas and admission also answer 403

    @property
    def is_dry_run(self) -> bool:
        return "dryRun=All" in self.uri

    @property
    def is_mutating(self) -> bool:
        """Dry runs count: they cost the server as much."""
        kept = self.group not in UNKEPT_GROUPS and self.resource not in UNKEPT_RESOURCES
        return self.verb in MUTATING_VERBS and kept

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource} {where} by {self.user} ({self.user_agent}): {self.status}"


class AuditLog:
    """Reads the file anew each time; holds nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def position(self) -> Position:
        """Now. Take it before an action, and pass it as `since` after."""
        return Position(offset=self._path.stat().st_size if self._path.exists() else 0)

    def requests(
        self, since: Position = START, *, user: str | None = None, user_agent: str | None = None
    ) -> Sequence[AuditedRequest]:
        """In the order received. `user` is the whole name, `user_agent` a part of the header."""
        merged: dict[str, dict[str, Any]] = {}
        for entry in self._entries(since):
            if entry["stage"] == "RequestReceived":
                merged[entry["auditID"]] = entry
            elif entry["auditID"] in merged:  # else it was received before `since`
                merged[entry["auditID"]] |= entry
        requests = (_request(entry) for entry in merged.values())
        return [
            request
            for request in requests
            if (user is None or request.user == user) and (user_agent is None or user_agent in request.user_agent)
        ]

    def mutating_requests(
        self,
        since: Position = START,
        *,
        user: str | None = None,
        user_agent: str | None = None,
        besides: frozenset[str] = frozenset(),
    ) -> Sequence[AuditedRequest]:
        """Those that change something, `besides` these resources (a leader's own heartbeat: `leases`)."""
        asked = self.requests(since, user=user, user_agent=user_agent)
        return [request for request in asked if request.is_mutating and request.resource not in besides]

    def forbidden(self, since: Position = START) -> Sequence[AuditedRequest]:
        """What somebody asked for without the right to it."""
        return [request for request in self.requests(since) if request.is_forbidden]

    def _entries(self, since: Position) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as log:
            if since.offset:  # may lie within a line that was just being written: what that tells is older
                log.seek(since.offset - 1)
                log.readline()
            for line in log:
                if line.endswith(b"\n"):  # the last one may be half written
                    yield _parsed(line)


def _parsed(line: bytes) -> dict[str, Any]:
    """Also what is nested more deeply than Python reads by itself: the API server logs all that it stores."""
    limit = sys.getrecursionlimit()
    try:
        sys.setrecursionlimit(max(limit, _JSON_LEVELS))
        entry: dict[str, Any] = json.loads(line)
    finally:
        sys.setrecursionlimit(limit)
    return entry


def _request(entry: dict[str, Any]) -> AuditedRequest:
    target = entry.get("objectRef", {})
    resource = "/".join(part for part in (target.get("resource"), target.get("subresource")) if part)
    return AuditedRequest(
        audit_id=entry["auditID"],
        user=entry.get("user", {}).get("username", ""),
        user_agent=entry.get("userAgent", ""),
        verb=entry["verb"],
        uri=entry["requestURI"],
        group=target.get("apiGroup", ""),
        resource=resource,
        namespace=target.get("namespace"),
        name=target.get("name"),
        received=entry["requestReceivedTimestamp"],
        status=entry.get("responseStatus", {}).get("code"),
        body=entry.get("requestObject"),
        is_forbidden=entry.get("annotations", {}).get("authorization.k8s.io/decision") == "forbid",
    )
