"""Fixtures for tests with a real API server.

Missing programs are built before the first test runs instead of inside it, because a first build takes minutes, must be
visible, and must not count against the timeout of a test.
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
from quire_cluster.binaries import HELM, KSTATUS, KUBE_SCORE, Binaries, ensure
from quire_cluster.control_plane import PROGRAMS, ControlPlane
from quire_cluster.crds import wait_established
from quire_cluster.debian import debian_programs
from quire_cluster.errors import ClusterError
from quire_cluster.progress import Progress

FIXTURES: Final = frozenset(
    {
        *("cluster_binaries", "api_server", "crd_server", "fake_nodes"),
        *("kstatus_program", "kube_score", "namespace", "prometheus_programs"),
    }
)
CRDS: Final = Path(__file__).parents[3] / "crds"
BUILD_NO_SERVER: Final = frozenset({"kstatus_program", "prometheus_programs"})
OUTCOME: Final = pytest.StashKey[Binaries | ClusterError]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _fixtures(item):
            item.add_marker("cluster")


def _fixtures(item: pytest.Item) -> frozenset[str]:
    """Return the fixtures of this plugin that a test uses."""
    return FIXTURES & set(getattr(item, "fixturenames", ()))


def pytest_collection_finish(session: pytest.Session) -> None:
    wanted = {name for item in session.items if item.get_closest_marker("cluster") for name in _fixtures(item)}
    if not wanted - {"prometheus_programs"} or session.config.option.collectonly:
        return
    programs: set[str] = set(KSTATUS.programs if "kstatus_program" in wanted else ())
    if wanted - BUILD_NO_SERVER:
        more = {
            "fake_nodes": fake.PROGRAMS,
            "kube_score": KUBE_SCORE.programs,
        }
        programs |= {*PROGRAMS, *HELM.programs, *(name for use in wanted & more.keys() for name in more[use])}
    with uncaptured(session.config):
        try:
            session.config.stash[OUTCOME] = ensure(programs, Progress(sys.stdout))
        except ClusterError as error:
            session.config.stash[OUTCOME] = error


def uncaptured(config: pytest.Config) -> AbstractContextManager[None]:
    """Show output immediately while the context lasts."""
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is None:
        return contextlib.nullcontext()
    shown: AbstractContextManager[None] = capture.global_and_fixture_disabled()
    return shown


@pytest.fixture(scope="session")
def cluster_binaries(request: pytest.FixtureRequest) -> Binaries:
    """Return the location of kubectl, helm and the control plane's programs."""
    return _built(request)


@pytest.fixture(scope="session")
def kstatus_program(request: pytest.FixtureRequest) -> Path:
    """Return the program that computes the status of objects with the library kstatus."""
    return _built(request)["kstatus"]


@pytest.fixture(scope="session")
def prometheus_programs() -> Binaries:
    """Return the locations of prometheus and promtool."""
    try:
        return debian_programs("prometheus", ("prometheus", "promtool"))
    except ClusterError as error:
        pytest.fail(str(error), pytrace=False)


def _built(request: pytest.FixtureRequest) -> Binaries:
    outcome = request.config.stash[OUTCOME]
    if isinstance(outcome, ClusterError):
        pytest.fail(str(outcome), pytrace=False)
    return outcome


@pytest.fixture(scope="session")
def kube_score(cluster_binaries: Binaries) -> Path:
    """Return the program that scores manifests."""
    return cluster_binaries["kube-score"]


@pytest.fixture(scope="session")
def api_server(cluster_binaries: Binaries) -> Iterator[ControlPlane]:
    """Provide one control plane for the whole run. A test keeps it running and works in its own namespace."""
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
    """Provide the API server with the CRDs."""
    api_server.kubectl("apply", "--server-side", "-f", str(CRDS))
    wait_established(api_server.client(), "llmdeployments.quire.dev", "llmadapters.quire.dev")
    return api_server


@pytest.fixture(scope="module")
def fake_nodes(api_server: ControlPlane) -> Iterator[fake.FakeNodes]:
    """Provide two nodes with eight GPUs each, on which pods become Ready without running."""
    nodes = fake.FakeNodes(api_server)
    try:
        nodes.start(2)
        yield nodes
    finally:
        nodes.stop()


@pytest.fixture
def namespace(api_server: ControlPlane) -> Iterator[str]:
    """Provide an empty namespace, which is deleted in the background after the test."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    created = api_server.client().post("/api/v1/namespaces", {"metadata": {"name": name}})
    assert created.ok, created.body
    yield name
    api_server.client().delete(f"/api/v1/namespaces/{name}")
