"""The chart, and helm to render and install it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from quire_cluster.control_plane import ControlPlane
from quire_cluster.helm import Helm

CHART = Path(__file__).parents[2] / "charts" / "quire"


@pytest.fixture(scope="session")
def helm(cluster_binaries: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return helm without a cluster, which rendering and linting do not need."""
    return Helm(cluster_binaries["helm"], CHART, tmp_path_factory.mktemp("helm"))


@pytest.fixture
def cluster_helm(cluster_binaries: Mapping[str, Path], api_server: ControlPlane, tmp_path: Path) -> Helm:
    """Return helm with the rights of the test cluster's administrator."""
    return Helm(cluster_binaries["helm"], CHART, tmp_path, kubeconfig=api_server.admin_kubeconfig)
