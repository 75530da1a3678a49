"""Fixtures around a real API server, for every test that asks for one.

What is missing is built before the first test runs, not inside one: a first build takes minutes, must be seen, and must
not count against a test's time limit.
"""

import contextlib
import sys
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import pytest

from quire_cluster import fake_nodes as fake
from quire_cluster.binaries import HELM, Binaries, ensure
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.crds import wait_established
from quire_cluster.errors import ClusterError
from quire_cluster.progress import Progress

FIXTURES: Final = frozenset({"cluster_binaries", "api_server", "crd_server", "fake_nodes", "namespace"})
CRD: Final = Path(__file__).parents[3] / "crds" / "llmdeployments.yaml"
OUTCOME: Final = pytest.StashKey[Binaries | ClusterError]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _fixtures(item):
            item.add_marker("cluster")


def _fixtures(item: pytest.Item) -> frozenset[str]:
    """Those of ours that it asks for."""
    return FIXTURES & set(getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = {name for item in session.items if item.get_closest_marker("cluster") for name in _fixtures(item)}
    if not wanted or session.config.option.collectonly:
        return
    programs = (*PROGRAMS, *HELM.programs, *(fake.PROGRAMS if "fake_nodes" in wanted else ()))
    with uncaptured(session.config):
        try:
            session.config.stash[OUTCOME] = ensure(programs, Progress(sys.stdout))
        except ClusterError as error:
            session.config.stash[OUTCOME] = error


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """What is printed meanwhile is seen at once."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return contextlib.nullcontext()
    shown: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return shown


@pytest.fixture(scope="session")
def cluster_binaries(request: pytest.FixtureRequest) -> Binaries:
    """Where kubectl, helm and the programs of the control plane are."""
    outcome = request.config.stash[OUTCOME]
    if isinstance(outcome, ClusterError):
        pytest.fail(str(outcome), pytrace=False)
    return outcome


@pytest.fixture(scope="session")
def api_server(cluster_binaries: Binaries) -> Iterator[ControlPlane]:
    """One control plane for the whole run. A test leaves it running, and works in a namespace of its own."""
    control_plane = ControlPlane.temporary(cluster_binaries)
    try:
        control_plane.start()
        yield control_plane
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)
    finally:
        control_plane.stop()


@pytest.fixture(scope="session")
def crd_server(api_server: ControlPlane) -> ControlPlane:
    """The API server once it serves LLMDeployments."""
    api_server.kubectl("apply", "--server-side", "-f", str(CRD))
    wait_established(api_server.client(), "llmdeployments.quire.dev")
    return api_server


@pytest.fixture(scope="module")
def fake_nodes(api_server: ControlPlane) -> Iterator[fake.FakeNodes]:
    """Two nodes with eight GPUs each, on which pods become Ready and nothing runs."""
    nodes = fake.FakeNodes(api_server)
    try:
        nodes.start(2)
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def namespace(api_server: ControlPlane) -> Iterator[str]:
    """An empty namespace; deleted in the background after the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    created = api_server.client().post("/api/v1/namespaces", {"metadata": {"name": name}})
    assert created.ok, created.body
    yield name
    api_server.client().delete(f"/api/v1/namespaces/{name}")
