"""The operator as a process on a real API server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kube_support.operators import Namespace, OperatorProcess, Operators, until

from quire_cluster.control_plane import ControlPlane
from quire_cluster.crds import wait_established

CRDS = Path(__file__).parents[3] / "crds"
LIMITED = ":limited:"
"""A part of the account name of the operator that test_rights.py runs without a permission."""


@pytest.fixture(scope="session")
def crd_installed(api_server: ControlPlane) -> Iterator[ControlPlane]:
    """Yield the API server with LLMDeployments. At the end, its audit log has no rejected request of an operator."""
    start = api_server.audit.position()
    api_server.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(CRDS))
    wait_established(api_server.client(), "llmdeployments.quire.dev", "llmadapters.quire.dev")
    yield api_server
    forbidden = [request for request in api_server.audit.forbidden(start) if request.user.endswith("-operator")]
    assert [str(request) for request in forbidden if LIMITED not in request.user] == []


@pytest.fixture(scope="session")
def operators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operators]:
    started = Operators(tmp_path_factory.mktemp("operators"))
    yield started
    started.stop()


@pytest.fixture
def space(crd_installed: ControlPlane, namespace: str) -> Namespace:
    """Return a namespace for this test only."""
    return Namespace(crd_installed, namespace)


@pytest.fixture(scope="session")
def shared_space(crd_installed: ControlPlane) -> Iterator[Namespace]:
    """Yield a namespace with one operator, for tests that do it no harm; each uses its own names."""
    created = crd_installed.client().post("/api/v1/namespaces", {"metadata": {"name": "shared"}})
    assert created.ok, created.body
    yield Namespace(crd_installed, "shared")
    crd_installed.client().delete("/api/v1/namespaces/shared")


@pytest.fixture(scope="session")
def operator(operators: Operators, shared_space: Namespace) -> Iterator[OperatorProcess]:
    """Yield the leading operator of the shared namespace, which resyncs every ten seconds and scales every second."""
    flags = ("--resync", "10s", "--autoscaling-period", "1s", "--gateway-selector", "app=gateway")
    process = operators.start(*shared_space.flags(), *flags, identity="shared-operator")
    shared_space.wait_holder(process.identity)
    yield process
    process.terminate()
    until(lambda: not process.is_alive)
