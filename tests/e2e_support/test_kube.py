"""Programs that scenarios run against a cluster."""

from pathlib import Path

import pytest
from process_ends import process_ends

from e2e_support.errors import CommandFailed
from e2e_support.kube import Kube

KUBECONFIG = """
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://127.0.0.1:9"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: c, context: {cluster: c, user: u}}]
current-context: c
"""


@pytest.fixture
def kube(tmp_path: Path) -> Kube:
    (tmp_path / "config").write_text(KUBECONFIG)
    return Kube(str(tmp_path / "config"), tmp_path / "kubectl")


def test_no_process_of_a_script_outlives_its_time(kube: Kube, tmp_path: Path) -> None:
    """As `kubectl port-forward … &` in a script that waits in vain for an answer."""
    script = f"sleep 600 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(CommandFailed, match="did not end within 1 s"):
        kube.script(script, seconds=1)
    assert process_ends(int((tmp_path / "pid").read_text()), 10)


def test_failed_script_is_quoted_with_its_output(kube: Kube) -> None:
    assert kube.script("echo $KUBECONFIG", seconds=60) == f"{kube.kubeconfig}\n"
    with pytest.raises(CommandFailed, match=r"(?s)false; echo never.*asked"):
        kube.script("echo asked >&2; false; echo never", seconds=60)
