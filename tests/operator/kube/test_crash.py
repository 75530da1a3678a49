"""The operator is killed with SIGKILL between any two of its writes and restarted: it ends at the same objects.

An undisturbed change of a spec shows the writes. Then it is made once for each of them, all at once, each in its own
namespace with an operator that dies just before that write. ``reconcile/test_reconcile.py`` and
``reconcile/test_canary.py`` do so for other changes, in memory.
"""

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.audit import Position
from quire_cluster.control_plane import ControlPlane

MADE: dict[str, Any] = {
    "model": {"source": "hf://org/model", "cache": {"size": "1Gi", "accessMode": "ReadWriteMany"}},
    "replicas": 2,
    "autoscaling": {"minReplicas": 1, "maxReplicas": 3},
}
CHANGED: dict[str, Any] = {"model": {"source": "hf://org/other"}, "replicas": 3, "engine": {"maxSequences": 8}}


def seen(space: Namespace, replicas: int) -> bool:
    """Return True if the operator and the Deployment's controller have observed the current spec."""
    resource, deployment = space.get("llmdeployments", "chat"), space.get("deployments", "chat")
    if resource is None or deployment is None:
        return False
    status = resource.get("status", {})
    return bool(
        status.get("observedGeneration") == resource["metadata"]["generation"]
        and deployment["status"].get("observedGeneration") == deployment["metadata"]["generation"]
        and deployment["spec"]["replicas"] == status.get("desiredReplicas") == replicas
    )


def make(space: Namespace) -> None:
    space.apply(**MADE)


def make_and_settle(space: Namespace) -> None:
    make(space)
    space.wait_settled("chat")


def change(space: Namespace) -> None:
    space.apply(**CHANGED)


def is_changed(space: Namespace) -> bool:
    return seen(space, 3) and "chat-models" not in space.names("persistentvolumeclaims")


MUST_WRITE = frozenset({"update Deployment", "delete PersistentVolumeClaim", "write-status LLMDeployment"})


def made_by_operator(space: Namespace, since: Position) -> Counter[str]:
    """Return the requests that created an object, by its address with a {} for the namespace.

    Events and the Lease belong to the operator itself, not to its work.
    """
    written = space.server.audit.mutating_requests(since, user_agent="quire-operator")
    made = (r for r in written if r.namespace == space.name and r.status == 201)
    addresses = (r.uri.partition("?")[0] for r in made if r.resource not in ("leases", "events"))
    return Counter(address.replace(space.name, "{}") for address in addresses)


def look(space: Namespace, addresses: Iterable[str]) -> dict[str, Any]:
    """Return the status and the objects at these addresses, without what differs between namespaces or over time."""
    resource = space.get("llmdeployments", "chat")
    assert resource is not None
    status, uid = resource["status"], resource["metadata"]["uid"]
    found: dict[str, Any] = {
        "status": [[c["type"], c["status"], c["reason"]] for c in status["conditions"]],
        "desired": status.get("autoscaling", {}).get("desiredReplicas"),
    }
    for address in addresses:
        answer = space.server.client().get(address.format(space.name))
        body = answer.body if answer.ok else {}
        spec = {key: value for key, value in body.items() if key not in ("metadata", "status")}
        for field in ("clusterIP", "clusterIPs"):
            spec.get("spec", {}).pop(field, None)
        metadata = body.get("metadata", {})
        ours = [e["fieldsV1"] for e in metadata.get("managedFields", ()) if e["manager"] == "quire"]
        text = json.dumps([spec, metadata.get("labels"), ours], sort_keys=True)
        found[address] = text.replace(uid, "UID").replace(space.name, "NAMESPACE")
    return found


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[object]:
    return [(key, found.get(key), wanted.get(key)) for key in wanted | found if found.get(key) != wanted.get(key)]


class Ordeal:
    """A change of a spec, with its namespaces and operators, undisturbed and killed."""

    def __init__(self, server: ControlPlane, operators: Operators, folder: Path) -> None:
        self.server, self.operators, self._folder = server, operators, folder
        self.spaces: list[Namespace] = []
        self.running: list[OperatorProcess] = []
        self.start = server.audit.position()

    def new_space(self) -> Namespace:
        name = f"crash-{uuid.uuid4().hex[:8]}"
        answer = self.server.client().post("/api/v1/namespaces", {"metadata": {"name": name}})
        assert answer.ok, answer.body
        self.spaces.append(Namespace(self.server, name))
        return self.spaces[-1]

    def armed_by(self, space: Namespace) -> Path:
        return self._folder / space.name

    def operator(self, space: Namespace, *, before_write: int | None = None) -> OperatorProcess:
        # The same identity, as a container that restarted in its pod: it owns the Lease and need not wait.
        operator = self.operators.start(
            *space.flags(),
            identity=space.name,
            before_write=before_write,
            armed_by=self.armed_by(space),
            tick_seconds=1.0,
        )
        self.running.append(operator)
        return operator

    def begin(self, space: Namespace) -> None:
        self.armed_by(space).touch()
        change(space)

    def undisturbed(self) -> tuple[Namespace, list[str]]:
        """Run without a disturbance; return the namespace and the operator's writes."""
        space = self.new_space()
        operator = self.operator(space)
        make_and_settle(space)
        self.begin(space)
        until(lambda: is_changed(space))
        writes: list[str] = []

        def is_quiet() -> bool:
            nonlocal writes
            before, writes = writes, operator.writes()
            return len(writes) == len(before)

        until(is_quiet, every=1.0)
        return space, writes

    def end(self) -> None:
        for operator in self.running:
            operator.kill()
        for space in self.spaces:
            self.server.client().delete(f"/api/v1/namespaces/{space.name}")


@pytest.fixture
def ordeal(crd_installed: ControlPlane, operators: Operators, tmp_path: Path) -> Iterator[Ordeal]:
    prepared = Ordeal(crd_installed, operators, tmp_path)
    yield prepared
    prepared.end()


def test_kill_before_any_write_leads_to_the_same_objects_once(ordeal: Ordeal) -> None:
    undisturbed, writes = ordeal.undisturbed()
    assert set(writes) >= MUST_WRITE, writes
    doomed = {n: ordeal.new_space() for n in range(1, len(writes) + 1)}
    first = {n: ordeal.operator(space, before_write=n) for n, space in doomed.items()}
    for space in doomed.values():
        make_and_settle(space)
    for space in doomed.values():
        ordeal.begin(space)
    # The number of status writes depends on the speed of the controllers: the last may not happen.
    until(lambda: sum(not o.is_alive for o in first.values()) >= len(first) - 2, why=lambda: alive(first))
    for operator in first.values():
        operator.kill()
    for space in doomed.values():
        ordeal.operator(space)
    addresses = frozenset(made_by_operator(undisturbed, ordeal.start))
    wanted = look(undisturbed, addresses)
    for n, space in doomed.items():
        killed = f"killed before write {n}, {writes[n - 1]}"
        until(lambda space=space: is_changed(space), why=lambda killed=killed: killed)
        until(
            lambda space=space: look(space, addresses) == wanted,
            why=lambda space=space, killed=killed: (killed, differences(look(space, addresses), wanted)),
        )
    for n, space in doomed.items():
        made = made_by_operator(space, ordeal.start)
        # If the server took longer than the client's timeout, it may have logged another status than 201.
        assert made.keys() <= addresses and set(made.values()) == {1}, f"killed before write {n}: {made}"
    print(f"killed before each of {len(writes)} writes: {Counter(writes)}")


def alive(operators: dict[int, OperatorProcess]) -> list[object]:
    return [(n, operator.writes()) for n, operator in operators.items() if operator.is_alive]
