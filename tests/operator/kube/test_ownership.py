"""managedFields: the fingerprint of our fields, and the fields of other clients."""

from typing import Any

import pytest

from quire_operator.kube.ownership import (
    ForeignField,
    breaks_contract,
    exists_in,
    fingerprint,
    foreign_fields,
    path_text,
    without,
)

ENGINE = 'k:{"name":"engine"}'
POD = ("f:spec", "f:template", "f:spec")


def entry(fields: dict[str, Any], *, manager: str = "quire", operation: str = "Apply", **more: Any) -> dict[str, Any]:
    return {"manager": manager, "operation": operation, "time": "t", "fieldsV1": fields} | more


OURS = entry(
    {"f:spec": {"f:replicas": {}, "f:template": {"f:spec": {"f:containers": {ENGINE: {".": {}, "f:image": {}}}}}}}
)


def theirs(fields: dict[str, Any], **more: Any) -> dict[str, Any]:
    return entry({"f:spec": fields}, manager="meddler", operation="Update", **more)


def deployment(*entries: dict[str, Any], image: str = "engine:1", replicas: int = 1, **spec: Any) -> dict[str, Any]:
    template = {"spec": {"containers": [{"name": "engine", "image": image}]}}
    metadata = {"name": "chat", "managedFields": list(entries)}
    return {"metadata": metadata, "spec": {"replicas": replicas, "template": template} | spec}


def test_fingerprint_covers_only_owned_fields() -> None:
    alone = fingerprint(deployment(OURS))
    others = (theirs({"f:paused": {}}), OURS, entry({}, subresource="status"))
    assert fingerprint(deployment(*others, paused=True)) == alone
    assert fingerprint(deployment(entry(OURS["fieldsV1"] | {"f:metadata": {}}))) != alone
    assert fingerprint(deployment(OURS | {"time": "later"})) == alone, "applied again, and the same"
    assert fingerprint(deployment(theirs({}))) == fingerprint(deployment()) == fingerprint({}) == ""


@pytest.mark.parametrize("changes", [{"replicas": 2}, {"image": "engine:2"}])
def test_second_operator_under_our_name_is_found_by_field_values(changes: dict[str, Any]) -> None:
    assert fingerprint(deployment(OURS, **changes)) != fingerprint(deployment(OURS))


@pytest.mark.parametrize(
    ("fields", "paths"),
    [
        ({"f:replicas": {}}, []),  # shared, with the same value
        ({"f:paused": {}}, ["spec.paused"]),
        ({"f:template": {"f:spec": {"f:nodeSelector": {".": {}, "f:disk": {}}}}}, ["spec.template.spec.nodeSelector"]),
        (
            {
                "f:template": {
                    "f:spec": {"f:containers": {ENGINE: {"f:tty": {}}, 'k:{"name":"x"}': {".": {}, "f:image": {}}}}
                }
            },
            ["spec.template.spec.containers[name=engine].tty", "spec.template.spec.containers[name=x]"],
        ),
        (
            {"f:template": {"f:metadata": {"f:annotations": {"f:a": {}, "f:kubectl.kubernetes.io/restartedAt": {}}}}},
            ["spec.template.metadata.annotations.a"],
        ),
    ],
)
def test_foreign_fields_are_reported_at_the_highest_path(fields: dict[str, Any], paths: list[str]) -> None:
    found = foreign_fields([OURS, theirs(fields)])
    assert [path_text(field.path) for field in found] == paths
    assert {field.manager for field in found} <= {"meddler"}


def test_status_and_own_entries_are_not_foreign_fields() -> None:
    status = entry({"f:status": {"f:replicas": {}}}, manager="kube-controller-manager", operation="Update")
    assert foreign_fields([OURS, status | {"subresource": "status"}]) == ()


@pytest.mark.parametrize(
    ("below", "breaks"),
    [
        (("f:hostNetwork",), True),
        (("f:containers", 'k:{"name":"x"}'), True),
        (("f:initContainers", 'k:{"name":"x"}'), True),
        (("f:containers", ENGINE, "f:ports", 'k:{"containerPort":1,"protocol":"TCP"}'), True),
        (("f:containers", ENGINE, "f:securityContext", "f:privileged"), True),
        (("f:securityContext", "f:runAsUser"), True),
        (("f:containers", ENGINE, "f:env", 'k:{"name":"A"}'), False),
        (("f:containers", ENGINE, "f:env", 'k:{"name":"QUIRE_ENGINE_PORT"}'), True),
        (("f:containers", 'k:{"name":"s"}', "f:env", 'k:{"name":"QUIRE_ENGINE_PORT"}'), False),
        (("f:nodeName",), True),
        (("f:nodeSelector", "f:disk"), False),
    ],
)
def test_fields_that_break_a_replica_are_recognized(below: tuple[str, ...], breaks: bool) -> None:
    assert breaks_contract((*POD, *below)) is breaks


def test_only_requests_before_readiness_break_a_replica() -> None:
    assert not breaks_contract(("f:spec", "f:paused"))
    assert not breaks_contract(("f:spec", "f:externalIPs"))
    assert breaks_contract(("f:spec", "f:publishNotReadyAddresses"))


def test_foreign_field_is_reported_with_its_object() -> None:
    field = ForeignField(path=("f:spec", "f:type"), manager="m", child="Service chat")
    assert str(field) == "to the Service chat: spec.type (set by m)"


def test_path_is_looked_up_in_the_rendered_object() -> None:
    body = {"spec": {"containers": [{"name": "engine", "ports": [{"containerPort": 1}]}]}}
    ports = ("f:spec", "f:containers", ENGINE, "f:ports")
    assert exists_in(body, (*ports, 'k:{"containerPort":1,"protocol":"TCP"}')), "a default that we leave out"
    assert not exists_in(body, (*ports, 'k:{"containerPort":2,"protocol":"TCP"}'))
    assert not exists_in(body, ("f:spec", "f:containers", 'k:{"name":"x"}'))
    assert not exists_in(body, ("f:spec", "f:replicas"))


def test_patch_without_fields_keeps_the_rest_of_their_lists() -> None:
    ports = [{"containerPort": 8000}, {"containerPort": 9}]
    containers = [{"name": "x"}, {"name": "engine", "tty": True, "ports": ports}]
    body = {"spec": {"template": {"spec": {"hostNetwork": True, "containers": containers, "nodeName": "a"}}}}
    patch = without(
        body,
        [
            (*POD, "f:hostNetwork"),
            (*POD, "f:containers", 'k:{"name":"x"}'),
            (*POD, "f:containers", ENGINE, "f:tty"),
            (*POD, "f:containers", ENGINE, "f:ports", 'k:{"containerPort":9,"protocol":"TCP"}'),
        ],
    )
    kept = [{"name": "engine", "ports": [{"containerPort": 8000}]}]
    assert patch == {"spec": {"template": {"spec": {"hostNetwork": None, "containers": kept}}}}
