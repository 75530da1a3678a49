"""Requests to the API server from its own audit log, the only proof of how many writes a client made.

The server logs a request twice. The first entry is written before the request is executed, so the log contains every
request that has been answered. The second entry adds the status and, for writes, the body.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NewType

MUTATING_VERBS: Final = frozenset({"create", "update", "patch", "delete", "deletecollection"})
# "create" of these resources is a review or a credential and stores nothing.
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


Position = NewType("Position", int)
"""A position in the log; later entries have greater ones."""
START: Final = Position(0)


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
    status: int | None  # None until it is answered
    body: Any  # None for reads and for sensitive bodies
    is_forbidden: bool = False  # by RBAC; quotas and admission also answer 403

    @property
    def is_dry_run(self) -> bool:
        return "dryRun=All" in self.uri

    @property
    def is_mutating(self) -> bool:
        """Return True for writes, including dry runs, which cost the server as much."""
        kept = self.group not in UNKEPT_GROUPS and self.resource not in UNKEPT_RESOURCES
        return self.verb in MUTATING_VERBS and kept

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource} {where} by {self.user} ({self.user_agent}): {self.status}"


class AuditLog:
    """A reader of the audit log without state: it reads the file again each time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def position(self) -> Position:
        """Return the current position. Call it before an action, and pass the result as `since` afterwards."""
        return Position(self._path.stat().st_size if self._path.exists() else 0)

    def requests(
        self, since: Position = START, *, user: str | None = None, user_agent: str | None = None
    ) -> Sequence[AuditedRequest]:
        """Return the requests in order of arrival. `user` is the complete name, `user_agent` a part of the header."""
        merged: dict[str, dict[str, Any]] = {}
        for entry in self._entries(since):
            if entry["stage"] == "RequestReceived":
                merged[entry["auditID"]] = entry
            elif entry["auditID"] in merged:  # otherwise it was received before `since`
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
        """Return the writes except those to the resources in `besides` (a leader's own heartbeat: `leases`)."""
        asked = self.requests(since, user=user, user_agent=user_agent)
        return [request for request in asked if request.is_mutating and request.resource not in besides]

    def forbidden(self, since: Position = START) -> Sequence[AuditedRequest]:
        """Return the requests that RBAC denied."""
        return [request for request in self.requests(since) if request.is_forbidden]

    def _entries(self, since: Position) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as log:
            if since:  # may be within a partially written line, whose entry is older
                log.seek(since - 1)
                log.readline()
            for line in log:
                if line.endswith(b"\n"):  # the last line may be incomplete
                    yield _parsed(line)


def _parsed(line: bytes) -> dict[str, Any]:
    """Parse an entry, even if it exceeds Python's default nesting limit, because the server logs whole objects."""
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
