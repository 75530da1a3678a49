"""The children that the operator creates on a real API server, and that it then leaves alone."""

from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, until

DEMO = Path(__file__).parents[3] / "examples" / "demo.yaml"
CHILDREN = {
    "deployments": ["chat"],
    "services": ["chat", "chat-headless"],
    "poddisruptionbudgets": ["chat"],
    "serviceaccounts": ["chat"],
}


@pytest.fixture(scope="session")
def deleted(shared_space: Namespace, operator: OperatorProcess) -> Namespace:
    """Return one that was deleted early: the garbage collector learns of a new kind only within half a minute."""
    shared_space.apply("gone", model={"source": "hf://org/model", "cache": {"size": "1Gi"}})
    shared_space.wait_settled("gone")
    assert "gone-models" in shared_space.names("persistentvolumeclaims")
    shared_space.delete("llmdeployments", "gone")
    return shared_space


@pytest.fixture(scope="session")
def demo(shared_space: Namespace, deleted: Namespace) -> Namespace:
    shared_space.server.kubectl("apply", "-n", shared_space.name, "-f", str(DEMO))
    shared_space.wait_settled("chat")
    return shared_space


def test_applying_the_demo_creates_owned_children(demo: Namespace) -> None:
    resource = demo.get("llmdeployments", "chat")
    assert resource is not None
    for kind, names in CHILDREN.items():
        assert [name for name in demo.names(kind) if name.startswith("chat")] == names
        for name in names:
            child = demo.get(kind, name)
            assert child is not None
            (owner,) = child["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (resource["metadata"]["uid"], True)


def test_first_reconcile_reads_nothing(shared_space: Namespace, operator: OperatorProcess) -> None:
    """The calls until the first status, of which a thousand new LLMDeployments cost a thousand times as many."""
    start = shared_space.server.audit.position()
    shared_space.apply("counted")
    shared_space.wait_settled("counted")
    asked = shared_space.server.audit.requests(start, user_agent=operator.identity)
    calls = [
        f"{request.verb} {request.resource} {request.status}"
        for request in asked
        if (request.name or "").startswith("counted")
    ]
    created = ("serviceaccounts", "services", "services", "poddisruptionbudgets", "deployments")
    expected = [*(f"patch {resource} 201" for resource in created), "patch llmdeployments/status 200"]
    assert calls[: len(expected)] == expected
    assert not any(call.startswith("get") for call in calls)


def test_retained_claim_survives_and_is_used_again(shared_space: Namespace, operator: OperatorProcess) -> None:
    model = {"source": "hf://org/model", "cache": {"size": "1Gi", "retain": "Retain"}}

    def claim() -> dict[str, Any]:
        return (shared_space.get("persistentvolumeclaims", "kept-models") or {}).get("metadata", {})

    shared_space.apply("kept", model=model)
    shared_space.wait_settled("kept")
    before = claim()
    assert "ownerReferences" not in before
    shared_space.delete("llmdeployments", "kept")
    until(lambda: shared_space.get("deployments", "kept") is None and not shared_space.pods("kept"))
    shared_space.apply("kept", model=model)
    shared_space.wait_settled("kept")
    assert claim()["uid"] == before["uid"] and "deletionTimestamp" not in claim()

    shared_space.apply("kept", model={"source": "hf://org/model", "cache": {"size": "1Gi", "retain": "Delete"}})
    until(lambda: claim().get("ownerReferences"))
    shared_space.delete("llmdeployments", "kept")
    until(lambda: not claim())


def test_deletion_removes_all_children(deleted: Namespace) -> None:
    def left() -> list[str]:
        kinds = (*CHILDREN, "replicasets", "pods", "persistentvolumeclaims")
        return [f"{kind}/{name}" for kind in kinds for name in deleted.names(kind) if name.startswith("gone")]

    until(lambda: not left(), why=left)
