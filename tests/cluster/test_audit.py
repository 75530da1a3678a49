"""The audit log: requests of a client, and which of them are writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire_cluster.audit import AuditLog

OPERATOR = "system:serviceaccount:quire:operator"


class Log:
    """A writer of log entries in the API server's format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = AuditLog(path)

    def received(self, audit_id: str, verb: str = "patch", resource: str = "deployments", **more: Any) -> None:
        self._append(self._entry(audit_id, verb, resource, "RequestReceived", **more))

    def completed(self, audit_id: str, verb: str = "patch", resource: str = "deployments", **more: Any) -> None:
        status = {"responseStatus": {"code": 200}, "requestObject": {"kind": "Deployment"}}
        self._append(self._entry(audit_id, verb, resource, "ResponseComplete", **more) | status)

    def both(self, audit_id: str, verb: str = "patch", resource: str = "deployments", **more: Any) -> None:
        self.received(audit_id, verb, resource, **more)
        self.completed(audit_id, verb, resource, **more)

    def _entry(self, audit_id: str, verb: str, resource: str, stage: str, **more: Any) -> dict[str, Any]:
        resource, _, subresource = resource.partition("/")
        target = {"resource": resource, "namespace": "default", "name": "chat", "apiGroup": more.pop("group", "apps")}
        if subresource:
            target["subresource"] = subresource
        return {
            "auditID": audit_id,
            "stage": stage,
            "verb": verb,
            "requestURI": more.pop("uri", "/apis/apps/v1/namespaces/default/deployments/chat?fieldManager=quire"),
            "user": {"username": more.pop("user", OPERATOR)},
            "userAgent": more.pop("user_agent", "quire-operator/0.1.0"),
            "objectRef": target,
            "requestReceivedTimestamp": "2026-01-01T00:00:00.000000Z",
        } | more

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as log:
            log.write(json.dumps(entry) + "\n")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "audit.log")


def test_two_audit_entries_of_a_request_are_merged(log: Log) -> None:
    log.both("a")
    (request,) = log.log.requests()
    assert (request.verb, request.resource, request.name, request.status) == ("patch", "deployments", "chat", 200)
    assert request.body == {"kind": "Deployment"}
    assert str(request) == f"patch deployments default/chat by {OPERATOR} (quire-operator/0.1.0): 200"


def test_unanswered_request_is_listed_without_a_status(log: Log) -> None:
    log.received("a")
    (request,) = log.log.mutating_requests()
    assert request.status is None


def test_the_end_of_an_older_request_is_not_a_new_one(log: Log) -> None:
    log.received("old")
    before = log.log.position()
    log.completed("old")
    log.both("new", resource="deployments/scale")
    assert [request.resource for request in log.log.requests(before)] == ["deployments/scale"]


def test_half_written_line_is_read_when_complete(log: Log) -> None:
    log.both("a")
    with log.path.open("a") as half:
        half.write('{"auditID": "b", "sta')
    assert [request.audit_id for request in log.log.requests()] == ["a"]


def test_entry_half_written_at_a_position_counts_as_older(log: Log) -> None:
    log.both("a")
    whole = log.path.read_text()
    log.received("b")
    written = log.path.read_text()
    for cut in range(len(whole) + 1, len(written)):
        log.path.write_text(written[:cut])
        position = log.log.position()
        log.path.write_text(written)
        assert log.log.requests(position) == []
        log.both("c")
        assert [request.audit_id for request in log.log.requests(position)] == ["c"]


def test_no_log_yet_means_no_requests(log: Log) -> None:
    assert log.log.requests(log.log.position()) == []


@pytest.mark.parametrize(
    ("verb", "resource", "group", "mutating"),
    [
        ("create", "services", "", True),
        ("update", "deployments", "apps", True),
        ("patch", "llmdeployments/status", "quire.dev", True),
        ("delete", "pods", "", True),
        ("deletecollection", "pods", "", True),
        ("get", "deployments", "apps", False),
        ("list", "deployments", "apps", False),
        ("watch", "deployments", "apps", False),
        ("create", "subjectaccessreviews", "authorization.k8s.io", False),
        ("create", "tokenreviews", "authentication.k8s.io", False),
        ("create", "serviceaccounts/token", "", False),
    ],
)
def test_only_persisted_writes_count_as_changes(log: Log, verb: str, resource: str, group: str, mutating: bool) -> None:
    log.both("a", verb, resource, group=group)
    assert bool(log.log.mutating_requests()) is mutating


def test_a_dry_run_is_marked(log: Log) -> None:
    log.both("a", uri="/apis/apps/v1/namespaces/default/deployments/chat?dryRun=All")
    assert [request.is_dry_run for request in log.log.mutating_requests()] == [True]


def test_requests_are_filtered_by_client(log: Log) -> None:
    log.both("ours", resource="leases", group="coordination.k8s.io")
    log.both("ours-too")
    log.both("theirs", user="admin", user_agent="kubectl/v1.35.4 (linux/amd64)")
    assert [request.audit_id for request in log.log.requests(user=OPERATOR)] == ["ours", "ours-too"]
    assert [request.audit_id for request in log.log.requests(user_agent="kubectl")] == ["theirs"]
    besides = log.log.mutating_requests(user=OPERATOR, besides=frozenset({"leases"}))
    assert [request.audit_id for request in besides] == ["ours-too"]


def test_rbac_denials_are_distinguished_from_quota_denials(log: Log) -> None:
    log.both("1", annotations={"authorization.k8s.io/decision": "forbid"})
    log.both("2", annotations={"authorization.k8s.io/decision": "allow"})
    assert [request.audit_id for request in log.log.forbidden()] == ["1"]
