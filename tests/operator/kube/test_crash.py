"""The operator killed with SIGKILL between any two of its writes, and started again: it ends at the same objects."""

import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.audit import Position
from quire_cluster.control_plane import ControlPlane

SPEC: dict[str, Any] = {
    "model": {"source": "hf://org/model", "cache": {"size": "1Gi"}},
    "replicas": 2,
    "autoscaling": {"minReplicas": 1, "maxReplicas": 3},
}
FIRST_PASS = [
    "write-status LLMDeployment",  # the number of replicas it starts from, before anything is acted upon
    "create PersistentVolumeClaim",
    "create ServiceAccount",
    "create Service",
    "create Service",
    "create PodDisruptionBudget",
    "create Deployment",
    "write-status LLMDeployment",
    "create Event",
]
OURS = {
    "deployments": ["chat"],
    "services": ["chat", "chat-headless"],
    "poddisruptionbudgets": ["chat"],
    "serviceaccounts": ["chat"],
    "persistentvolumeclaims": ["chat-models"],
}


def look(space: Namespace) -> dict[str, Any]:
    """All that the operator made, less what differs from one namespace or minute to the next."""
    objects: dict[str, Any] = {}
    for kind, names in OURS.items():
        for name in names:
            body = space.get(kind, name)
            assert body is not None
            spec = dict(body.get("spec", {}))
            for field in ("clusterIP", "clusterIPs"):
                spec.pop(field, None)
            ours = [e["fieldsV1"] for e in body["metadata"]["managedFields"] if e["manager"] == "quire"]
            (owner,) = body["metadata"]["ownerReferences"]
            objects[f"{kind}/{name}"] = (spec, body["metadata"]["labels"], str(ours).replace(owner["uid"], "its uid"))
    resource = space.get("llmdeployments", "chat")
    assert resource is not None
    status = resource["status"]
    objects["status"] = [(c["type"], c["status"], c["reason"]) for c in status["conditions"]], status["autoscaling"]
    return objects


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[object]:
    return [(key, found[key], wanted[key]) for key in wanted if found[key] != wanted[key]]


def created(space: Namespace, since: Position) -> Counter[str]:
    """Requests that made an object, by object."""
    written = space.server.audit.mutating_requests(since, user_agent="quire-operator")
    made = (
        r for r in written if r.namespace == space.name and r.status == 201 and r.resource not in ("leases", "events")
    )
    return Counter(f"{request.resource}/{request.name}" for request in made)


@pytest.fixture
def spaces(crd_installed: ControlPlane) -> Iterator[list[Namespace]]:
    """One namespace for each write, and one where nothing happens to the operator."""
    made = []
    for _ in range(len(FIRST_PASS) + 1):
        name = f"crash-{uuid.uuid4().hex[:8]}"
        answer = crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": name}})
        assert answer.ok, answer.body
        made.append(Namespace(crd_installed, name))
    yield made
    for space in made:
        crd_installed.client().delete(f"/api/v1/namespaces/{space.name}")


def test_killed_before_any_write_and_started_again_it_makes_the_same_objects_once(
    spaces: list[Namespace], operators: Operators
) -> None:
    start = spaces[0].server.audit.position()
    for space in spaces:
        space.apply(**SPEC)
    undisturbed, *doomed = spaces
    first: list[OperatorProcess] = [operators.start(*undisturbed.flags())]
    # The same identity, as a container that was restarted in its pod: its Lease is its own, it need not wait.
    for n, space in enumerate(doomed, start=1):
        first.append(operators.start(*space.flags(), identity=space.name, before_write=n))
    undisturbed.wait_settled("chat")
    assert first[0].writes()[: len(FIRST_PASS)] == FIRST_PASS
    until(lambda: not any(operator.is_alive for operator in first[1:]), within=30)

    second = [operators.start(*space.flags(), identity=space.name) for space in doomed]
    for space in doomed:
        space.wait_settled("chat", within=30)
    wanted = look(undisturbed)
    for space in doomed:
        until(lambda space=space: look(space) == wanted, why=lambda space=space: differences(look(space), wanted))
    objects = Counter({f"{kind}/{name}": 1 for kind, names in OURS.items() for name in names})
    for n, space in enumerate(spaces):
        assert created(space, start) == objects, f"killed before write {n} ({FIRST_PASS[n - 1] if n else 'never'})"
        assert len(space.names("replicasets")) == 1
    for operator in (first[0], *second):
        operator.terminate()
    until(lambda: not any(operator.is_alive for operator in (first[0], *second)))


def test_a_decision_that_was_persisted_before_a_crash_is_carried_out_after_it(
    space: Namespace, operators: Operators
) -> None:
    space.apply(replicas=1, autoscaling={"minReplicas": 1, "maxReplicas": 8})
    first = operators.start(*space.flags(), identity=space.name)
    space.wait_settled("chat")
    first.kill()
    space.patch("llmdeployments", "chat/status", {"status": {"autoscaling": {"desiredReplicas": 4}}}, manager="quire")
    second = operators.start(*space.flags(), identity=space.name)
    until(lambda: (space.get("deployments", "chat") or {})["spec"]["replicas"] == 4)
    second.terminate()
    until(lambda: not second.is_alive)
