"""The contract of pod templates on a real API server: violations are rejected together; added ones are removed."""

from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, until


@pytest.fixture
def shared(shared_space: Namespace, operator: OperatorProcess) -> Namespace:
    return shared_space


def test_server_errors_are_shown_unchanged(shared: Namespace) -> None:
    """Each of these is a trap: fields of a Deployment that pods do not have, and a pod that is no replica."""
    traps: dict[str, tuple[dict[str, Any], str]] = {
        "trap-replicas": ({"replicas": 3}, "field not declared in schema"),
        "trap-restart": ({"restartPolicy": "Never"}, 'supported values: "Always"'),
        "trap-deadline": ({"activeDeadlineSeconds": 60}, "activeDeadlineSeconds"),
        "trap-mount": (
            {"containers": [{"name": "engine", "volumeMounts": [{"name": "no-such", "mountPath": "/x"}]}]},
            "no-such",
        ),
    }
    for name, (pod, _) in traps.items():
        shared.apply(name, podTemplate={"spec": pod})
    for name, (_, says) in traps.items():
        message = shared.wait_reason(name, "Ready", "InvalidSpec")["message"]
        assert f"the API server rejected the Deployment {name}" in message and says in message


def test_foreign_service_fields_are_removed_or_named(shared: Namespace) -> None:
    shared.apply("exposed")
    shared.wait_settled("exposed")
    added = {"publishNotReadyAddresses": True, "externalIPs": ["192.0.2.1"]}
    shared.patch("services", "exposed", {"spec": added}, manager="meddler")
    added_fields = shared.wait_reason("exposed", "ForeignFields", "FieldsAdded")
    assert "to the Service exposed: spec.externalIPs (set by meddler)" in added_fields["message"]
    assert "publishNotReadyAddresses" not in added_fields["message"]

    def ready_alone() -> bool:
        service = shared.get("services", "exposed")
        return service is not None and not service["spec"].get("publishNotReadyAddresses")

    until(ready_alone)
    shared.patch(
        "services", "exposed", {"spec": {"externalIPs": None, "externalTrafficPolicy": None}}, manager="meddler"
    )
    shared.wait_reason("exposed", "ForeignFields", "NoneFound")


def test_a_child_that_another_controller_owns_is_never_touched(shared: Namespace) -> None:
    theirs = shared.create("configmaps", {"metadata": {"name": "another-owner"}})["metadata"]
    owner = {"apiVersion": "v1", "kind": "ConfigMap", "name": "another-owner", "uid": theirs["uid"], "controller": True}
    labels = {"quire.dev/llmdeployment": "owned"}
    metadata = {"name": "owned", "labels": labels, "ownerReferences": [owner]}
    budget = shared.create("poddisruptionbudgets", {"metadata": metadata, "spec": {"maxUnavailable": 3}})
    shared.apply("owned")
    ready = shared.wait_reason("owned", "Ready", "NameConflict")
    assert "PodDisruptionBudget owned already exists and belongs to ConfigMap another-owner" in ready["message"]
    after = shared.get("poddisruptionbudgets", "owned")
    assert after is not None and after["spec"] == budget["spec"]
    assert "quire" not in {entry["manager"] for entry in after["metadata"]["managedFields"]}


def test_the_longest_name_has_all_its_children(shared: Namespace) -> None:
    name = "n" * 54
    shared.apply(name, model={"source": "hf://org/model", "cache": {"size": "1Gi"}})
    shared.wait_settled(name)
    assert {name, f"{name}-headless"} <= set(shared.names("services"))
    assert f"{name}-models" in shared.names("persistentvolumeclaims")
