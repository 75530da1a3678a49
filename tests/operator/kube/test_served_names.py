"""Two LLMDeployments that ask for one served name, in two namespaces that one gateway serves."""

from collections.abc import Iterator

import pytest
from kube_support.operators import Namespace, Operators, until

from quire_cluster.control_plane import ControlPlane


@pytest.fixture
def two(crd_installed: ControlPlane, operators: Operators, space: Namespace) -> Iterator[tuple[Namespace, Namespace]]:
    """Namespaces under one operator."""
    created = crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": f"{space.name}-b"}})
    assert created.ok, created.body
    other = Namespace(crd_installed, f"{space.name}-b")
    operator = operators.start(*space.flags(crd_installed.admin_kubeconfig), "--watch-namespace", other.name)
    space.wait_holder(operator.identity)
    yield space, other
    operator.kill()
    crd_installed.client().delete(f"/api/v1/namespaces/{other.name}")


def wait_younger(older: Namespace, younger: Namespace) -> None:
    """The API server's clock counts seconds, and of two made in one second the uid decides."""
    first = (older.get("llmdeployments", "chat") or {})["metadata"]["creationTimestamp"]

    def made_later() -> bool:
        younger.apply("probe")
        made = (younger.get("llmdeployments", "probe") or {})["metadata"]["creationTimestamp"]
        younger.delete("llmdeployments", "probe")
        return bool(made > first)

    until(made_later)


def test_the_older_has_the_name_until_it_goes(two: tuple[Namespace, Namespace]) -> None:
    older, younger = two
    older.apply("chat", replicas=1)
    older.wait_settled("chat")
    wait_younger(older, younger)
    younger.apply("talk", replicas=1, model={"source": "file:///m", "servedName": "chat"})
    younger.wait_settled("talk")
    ready = younger.wait_reason("talk", "Ready", "ServedNameConflict")
    assert f"go to {older.name}/chat, which serves it and is older" in ready["message"]
    assert younger.condition("talk", "Degraded")["reason"] == "ServedNameConflict"
    assert older.condition("chat", "Ready")["reason"] == "Starting"
    service = younger.get("services", "talk")
    assert service is not None and service["metadata"]["annotations"]["quire.dev/served-name"] == "chat"

    older.delete("services", "chat")  # made anew, it is younger than the other's; its LLMDeployment is not
    until(lambda: older.get("services", "chat"))
    younger.touch("talk", "again")
    assert younger.wait_reason("talk", "Ready", "ServedNameConflict")
    assert older.condition("chat", "Ready")["reason"] == "Starting"

    older.apply("chat", replicas=1, model={"source": "file:///models/demo", "servedName": "else"})
    younger.wait_reason("talk", "Ready", "Starting")
    older.apply("chat", replicas=1)
    younger.wait_reason("talk", "Ready", "ServedNameConflict")
    older.delete("llmdeployments", "chat")
    # As the garbage collector does, which may be slow to learn of a new kind.
    older.delete("services", "chat", may_be_gone=True)
    younger.wait_reason("talk", "Ready", "Starting")
    assert younger.condition("talk", "Degraded")["reason"] == "AsExpected"
