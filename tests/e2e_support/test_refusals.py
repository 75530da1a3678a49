"""Requests and denied requests of a namespace's accounts, from an audit log."""

import json
from datetime import UTC, datetime
from typing import Any

from e2e_support.refusals import Outage, read

SINCE = datetime(2026, 1, 2, tzinfo=UTC)
OPERATOR = "system:serviceaccount:quire-system:quire-operator"


def line(
    *,
    user: str = OPERATOR,
    day: int = 3,
    decision: str = "allow",
    stage: str = "ResponseComplete",
    **target: str,
) -> bytes:
    entry: dict[str, Any] = {
        "stage": stage,
        "verb": "patch",
        "user": {"username": user},
        "objectRef": target,
        "requestReceivedTimestamp": f"2026-01-0{day}T00:00:00.000000Z",
        "responseStatus": {"message": "cannot patch it"} if decision == "forbid" else {"code": 200},
        "annotations": {"authorization.k8s.io/decision": decision},
    }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def test_only_new_answered_requests_of_the_namespace_count() -> None:
    asked = read(
        [
            line(resource="llmdeployments", subresource="status"),
            line(resource="deployments"),
            line(resource="deployments", stage="RequestReceived"),
            line(resource="deployments", day=1),
            line(resource="deployments", user="system:serviceaccount:other:quire-operator"),
            line(resource="deployments", user="admin", name=OPERATOR),
            line(resource="deployments")[:-1],
            line(resource="", user=OPERATOR.replace("operator", "gateway")),
        ],
        "quire-system:",
        since=SINCE,
    )
    assert asked.verbs == {"patch llmdeployments/status": 1, "patch deployments": 1, "patch ": 1}
    assert asked.refused == ()


def test_forbidden_request_is_reported_with_the_server_message() -> None:
    asked = read([line(resource="secrets", decision="forbid")], "quire-system:", since=SINCE)
    assert asked.refused == (f"{OPERATOR}: cannot patch it",)


def test_a_starting_server_does_not_report_missing_permissions() -> None:
    outage = Outage(begun=datetime(2026, 1, 3, tzinfo=UTC), ended=datetime(2026, 1, 4, tzinfo=UTC))
    asked = read(
        [line(resource="pods", decision="forbid", day=day) for day in (2, 3, 4, 5)],
        "quire-system:",
        since=SINCE,
        outages=[outage],
    )
    assert asked.verbs == {"patch pods": 4}
    assert len(asked.refused) == 2, "before it and after it"
