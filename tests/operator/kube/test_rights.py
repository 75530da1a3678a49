"""The chart's permissions of the operator: none is missing, and none is unused.

Every operator of these tests runs with them, in its namespaces or everywhere. This one runs through a whole life, and
the audit log shows rejected requests and unused permissions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.request import urlopen

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until
from kube_support.replicas import IDLE, engines_at
from kube_support.rights import operator_rights

from quire_cluster.audit import Position
from quire_cluster.control_plane import ControlPlane
from quire_operator.kube.client import WAKE_SLICES

ENGINES = "127.0.77.4"
GATEWAY = {"addressType": "IPv4", "endpoints": [{"addresses": ["10.0.0.1"]}], "ports": []}
OPTIONAL_GROUPS = frozenset({"leaderworkerset.x-k8s.io", "monitoring.coreos.com", "networking.k8s.io"})
"""Children that a setting requires, or that another project's CRDs define; they have their own tests."""
UNUSED = {
    (
        "quire.dev",
        "llmdeployments/finalizers",
        "update",
    ): "asked for only where OwnerReferencesPermissionEnforcement is on",
    ("", "secrets", "create"): "the secret of groups of pods, as in test_group_passes.py",
    ("coordination.k8s.io", "leases", "list"): "kopf lists before it watches; counted with the watch of all kinds",
}
"""Permissions that this life does not use, and their purpose."""


@dataclass(frozen=True, slots=True)
class Right:
    group: str
    resource: str
    verb: str

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}.{self.group}"


def rights(server: ControlPlane, namespace: str, *, everywhere: bool) -> set[Right]:
    documents = operator_rights(server, namespace, everywhere=everywhere)
    rules = [rule for document in documents if "rules" in document for rule in document["rules"]]
    return {
        Right(group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(space: Namespace, since: Position) -> set[Right]:
    user = f"system:serviceaccount:{space.name}:quire-operator"
    asked = space.server.audit.requests(since, user=user)
    found = set()
    for request in asked:
        found.add(Right(request.group, request.resource, request.verb))
        if request.verb == "patch" and request.status == 201:
            found.add(Right(request.group, request.resource, "create"))  # server-side apply of what was not there
    return found


@pytest.fixture(scope="module")
def life(crd_installed: ControlPlane, operators: Operators) -> Iterator[tuple[Namespace, Position, OperatorProcess]]:
    """Yield an operator that created all kinds of children, repaired, scaled and deleted one, and recorded events."""
    space = Namespace(crd_installed, "rights")
    assert crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": "rights"}}).ok
    start = crd_installed.audit.position()
    for name, label in (("old-wake", WAKE_SLICES), ("theirs", "kubernetes.io/service-name=theirs")):
        labels = dict([label.split("=")])
        space.create("endpointslices", {"metadata": {"name": name, "labels": labels}, **GATEWAY})
    operator = operators.start(*space.flags(), identity="rights", tick_seconds=1.0)
    defaults = "engine: {image: registry.example/theirs:1}\n"
    space.create("configmaps", {"metadata": {"name": "quire-defaults"}, "data": {"spec": defaults}})
    cached: dict[str, Any] = {"source": "hf://org/model", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}}
    rules = {"window": "0s", "period": "1s"}
    space.apply("chat", replicas=2, model=cached, autoscaling={"minReplicas": 1, "maxReplicas": 2, "scaleDown": rules})
    space.wait_settled("chat")
    with engines_at(ENGINES, IDLE):
        until(lambda: len(space.run_pods("chat", address=ENGINES)) == 2)
        until(lambda: len(space.pods("chat")) == 1)
    space.patch("services", "chat", {"spec": {"sessionAffinity": "ClientIP", "selector": {"a": "b"}}})
    until(lambda: "a" not in (space.get("services", "chat") or {"spec": {"selector": {"a": ""}}})["spec"]["selector"])
    space.apply("chat", replicas=2, model={"source": "hf://org/model"})
    until(lambda: "chat-models" not in space.names("persistentvolumeclaims"))
    space.wait_reason("chat", "Autoscaling", "NotConfigured")
    space.apply("tried", rollout={"strategy": "Canary"})
    until(lambda: len(space.names("controllerrevisions")) == 1)
    space.apply("tried", rollout={"strategy": "Canary"}, engine={"maxSequences": 8})
    until(lambda: "tried-canary" in space.names("deployments"))
    space.apply("base", replicas=0, engine={"adapters": {}})
    space.apply_adapter("legal", deployment="base")
    until(lambda: ((space.get("llmadapters", "legal") or {}).get("status") or {}).get("conditions"))
    until(lambda: "legal" in str((space.get("configmaps", "base-adapters") or {}).get("data")))
    until(lambda: space.get("endpointslices", "old-wake") is None, why=operator.last_words)
    yield space, start, operator
    operator.kill()
    crd_installed.client().delete("/api/v1/namespaces/rights")


def test_no_request_of_the_operator_is_forbidden(life: tuple[Namespace, Position, OperatorProcess]) -> None:
    space, start, _ = life
    user = f"system:serviceaccount:{space.name}:quire-operator"
    asked = space.server.audit.requests(start, user=user)
    assert len(asked) > 50
    assert [str(request) for request in asked if request.status == 403] == []


def test_a_config_map_of_a_user_gives_replicas_no_image(life: tuple[Namespace, Position, OperatorProcess]) -> None:
    """A user with the right to write ConfigMaps must not decide what runs with the secrets of the namespace."""
    space, _, _ = life
    deployment: Any = space.get("deployments", "chat")
    assert "registry.example/theirs:1" not in str(deployment["spec"])


def test_only_wake_slices_of_earlier_versions_are_deleted(life: tuple[Namespace, Position, OperatorProcess]) -> None:
    """A Service would go on to send some requests to a port that gateways no longer have."""
    space, _, _ = life
    assert space.get("endpointslices", "old-wake") is None
    assert space.get("endpointslices", "theirs") is not None


def test_every_granted_permission_is_used(life: tuple[Namespace, Position, OperatorProcess]) -> None:
    space, start, _ = life
    given = rights(space.server, space.name, everywhere=False)
    unused = {right for right in given - used(space, start) if right.group not in OPTIONAL_GROUPS}
    children = {right.resource for right in given if right.verb == "delete"}
    # Only one kind is deleted as no longer desired, and some kinds are missing in no pass after the first, so that they
    # are not read; the others are deleted and read by the same code.
    same_code = ("delete", "get")
    surplus = {right for right in unused if not (right.verb in same_code and right.resource in children)}
    surplus -= {Right(*right) for right in UNUSED}
    assert surplus == set(), sorted(map(str, surplus))


@pytest.mark.parametrize("everywhere", [False, True])
def test_no_right_is_a_wildcard_or_reads_secrets_or_logs(crd_installed: ControlPlane, everywhere: bool) -> None:
    given = rights(crd_installed, "any", everywhere=everywhere)
    assert given and not [right for right in given if "*" in (right.group, right.resource, right.verb)]
    # The lists of adapters are ConfigMaps (ADR 0078); RBAC cannot restrict the rights to those with our label.
    assert not {right.resource for right in given} & {"pods/log", "pods/exec"}
    assert {right.verb for right in given if right.resource == "secrets"} == {"create"}, "they are never read"
    # The nodes' labels are for the capacity check; test_capacity.py uses them.
    assert {right.verb for right in given if right.resource == "nodes"} == ({"list"} if everywhere else set())


def test_missing_list_permission_affects_no_other_kind(crd_installed: ControlPlane, operators: Operators) -> None:
    space = Namespace(crd_installed, "limited")
    client = crd_installed.client()
    assert client.post("/api/v1/namespaces", {"metadata": {"name": space.name}}).ok
    flags = space.flags()
    roles = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{space.name}/roles"
    for role in client.get(roles).body["items"]:
        role["rules"] = [rule for rule in role["rules"] if "poddisruptionbudgets" not in rule["resources"]]
        assert client.request("PUT", f"{roles}/{role['metadata']['name']}", role).ok
    operator = operators.start(*flags, identity="limited")
    try:
        space.apply("chat")
        until(lambda: space.get("deployments", "chat"), why=operator.last_words)
        space.wait_reason("chat", "Ready", "Forbidden")
        until(lambda: operator.said("no permission to list PodDisruptionBudget"))
        with urlopen(f"http://127.0.0.1:{operator.port()}/readyz", timeout=10) as answer:
            assert b"no permission to list PodDisruptionBudget" in answer.read()
    finally:
        operator.kill()
        client.delete(f"/api/v1/namespaces/{space.name}")
