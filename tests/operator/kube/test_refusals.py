"""Specs that cannot be applied: an invalid spec, a taken name, a rejection by the API server. Each is reported."""

import pytest
from kube_support.operators import Namespace, OperatorProcess, until


@pytest.fixture
def shared(shared_space: Namespace, operator: OperatorProcess) -> Namespace:
    return shared_space


def test_object_rejected_by_the_server_is_not_retried(shared: Namespace) -> None:
    """An unknown field gets 500 and a wrong value 422. The user must fix both, so neither is retried."""
    start = shared.server.audit.position()
    shared.apply("unknown", podTemplate={"spec": {"nodeSelektor": {"a": "b"}}})
    shared.apply("negative", podTemplate={"spec": {"priority": "high"}})
    for name in ("unknown", "negative"):
        ready = shared.wait_reason(name, "Ready", "InvalidSpec")
        assert "the API server rejected the Deployment" in ready["message"]
        shared.touch(name, "again")
    shared.apply("unknown", podTemplate={"spec": {"nodeSelector": {"a": "b"}}})
    shared.wait_settled("unknown")
    tried = shared.server.audit.mutating_requests(start, user_agent="shared-operator")
    assert sum((r.resource, r.name) == ("deployments", "negative") for r in tried) == 1


def test_foreign_objects_that_differ_in_no_field_are_never_changed(shared: Namespace) -> None:
    """Server-side apply alone would take them over: nothing of what it sets conflicts with them."""
    shared.apply("pattern")
    shared.wait_settled("pattern")
    before = {}
    for kind in ("serviceaccounts", "services", "poddisruptionbudgets", "deployments"):
        body = shared.get(kind, "pattern")
        assert body is not None
        body["metadata"] = {"name": "equal", "annotations": body["metadata"].get("annotations", {})}
        for field in ("clusterIP", "clusterIPs"):
            body.get("spec", {}).pop(field, None)
        before[kind] = shared.create(kind, {key: value for key, value in body.items() if key != "status"})
    start = shared.server.audit.position()
    shared.apply("equal")
    message = shared.wait_reason("equal", "Ready", "NameConflict")["message"]
    for kind, theirs in before.items():
        assert f"{theirs['kind']} equal already exists and was not created by quire" in message
        after = shared.get(kind, "equal")
        assert after is not None
        if kind in ("serviceaccounts", "services"):  # the controllers of the others report their status
            assert after["metadata"]["resourceVersion"] == theirs["metadata"]["resourceVersion"]
        assert "quire" not in {entry["manager"] for entry in after["metadata"]["managedFields"]}
    tried = shared.server.audit.mutating_requests(start, user_agent="shared-operator")
    assert {r.status for r in tried if r.name == "equal" and r.resource in before} == {409}
    assert "equal-headless" in shared.names("services"), "what is free is made all the same"


def test_recreated_resource_waits_for_old_children(shared: Namespace) -> None:
    shared.apply("recreated", replicas=1)
    shared.wait_settled("recreated")
    old = shared.get("deployments", "recreated")
    shared.delete("llmdeployments", "recreated")
    shared.apply("recreated", replicas=2)

    def replaced() -> bool:
        new = shared.get("deployments", "recreated")
        return new is not None and old is not None and new["metadata"]["uid"] != old["metadata"]["uid"]

    until(replaced)  # the garbage collector learns of a new kind within half a minute
    shared.wait_settled("recreated")
