"""The fields that a pod template may not loosen: the restricted Pod Security Standard, and the exceptions."""

from collections.abc import Callable
from typing import Any

import pytest
from kube_support.pod_security import CASES, SAFE

from quire_operator.api import Invalid
from quire_operator.deployment.pod_rules import EXCEPTIONS
from quire_operator.deployment.pod_template import Images


@pytest.mark.parametrize("name", CASES)
def test_loosened_field_is_refused_by_its_path(make: Callable[..., Any], name: str) -> None:
    case = CASES[name]
    found = make(podTemplate=case.template)
    assert isinstance(found, Invalid)
    (problem,) = found.problems
    assert problem.path == f"spec.podTemplate.{case.path}"
    assert ("(exception: " in problem.message) is (case.rule is not None)
    assert case.rule is None or f"(exception: {case.rule})" in problem.message


@pytest.mark.parametrize("name", CASES)
def test_exception_allows_exactly_its_own_field(make: Callable[..., Any], name: str) -> None:
    case = CASES[name]
    others = EXCEPTIONS - {case.rule}
    images = Images(engine="engine:1", allowed_exceptions=frozenset(others))
    assert isinstance(make(podTemplate=case.template, images=images), Invalid)
    if case.rule is not None:
        images = Images(engine="engine:1", allowed_exceptions=frozenset({case.rule}))
        assert not isinstance(make(podTemplate=case.template, images=images), Invalid)


def test_every_exception_has_a_case() -> None:
    assert {case.rule for case in CASES.values()} - {None} == EXCEPTIONS


def test_all_volume_types_of_the_standard_are_accepted(make: Callable[..., Any]) -> None:
    kinds: dict[str, Any] = {
        "configMap": {"name": "c"},
        "csi": {"driver": "secrets.example"},
        "downwardAPI": {},
        "emptyDir": {},
        "ephemeral": {},
        "image": {"reference": "r"},
        "persistentVolumeClaim": {"claimName": "c"},
        "projected": {"sources": [{"configMap": {"name": "c"}}]},
        "secret": {"secretName": "s"},
    }
    volumes = [{"name": kind.lower(), kind: source} for kind, source in kinds.items()]
    sidecar = {"name": "s", "image": "s", "securityContext": SAFE}
    assert not isinstance(make(podTemplate={"spec": {"volumes": volumes, "containers": [sidecar]}}), Invalid)


def test_command_that_mounts_a_node_socket_is_refused(make: Callable[..., Any]) -> None:
    """The socket of containerd belongs to root's group: with both fields, a pod controls its node."""
    pod = {
        "securityContext": {"supplementalGroups": [0]},
        "volumes": [{"name": "h", "hostPath": {"path": "/run/containerd"}}],
    }
    found = make(podTemplate={"spec": pod})
    assert isinstance(found, Invalid)
    assert {problem.path for problem in found.problems} == {
        "spec.podTemplate.spec.securityContext.supplementalGroups",
        "spec.podTemplate.spec.volumes[name=h].hostPath",
    }


def test_cluster_may_choose_the_user_of_replicas(make: Callable[..., Any]) -> None:
    """OpenShift's restricted-v2 rejects every user outside the range of the namespace."""
    manifests = make(images=Images(engine="engine:1", user_id=None))
    body: Any = manifests.workload.body
    assert body["spec"]["template"]["spec"]["securityContext"] == {
        "runAsNonRoot": True,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
