"""`cluster.py` as a user calls it from a shell."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

COMMAND = Path(__file__).parent / "cluster.py"


def cluster(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(COMMAND), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "state"
    cluster("down", "--state-dir", tmp_path / "state")


def test_repeated_up_restarts_dead_components(cluster_binaries: Mapping[str, Path], state: Path) -> None:
    assert cluster("status", "--state-dir", state).returncode == 3

    up = cluster("up", "--state-dir", state)
    assert up.returncode == 0, up.stderr
    assert f"export KUBECONFIG={state}/admin.kubeconfig" in up.stdout
    status = cluster("status", "--state-dir", state)
    assert status.returncode == 0
    for name in ("kube-apiserver", "etcd"):
        found = re.search(rf"{name} +process (\d+)", cluster("status", "--state-dir", state).stdout)
        assert found is not None
        os.kill(int(found[1]), signal.SIGKILL)
        assert re.search(f"{name} +not running", cluster("status", "--state-dir", state).stdout)
        assert cluster("up", "--state-dir", state).stdout == up.stdout
    kubeconfig = state / "admin.kubeconfig"
    kubectl = [str(cluster_binaries["kubectl"]), "--kubeconfig", str(kubeconfig), "get", "namespace", "default"]
    assert subprocess.run(kubectl, capture_output=True).returncode == 0

    other_tier = cluster("up", "--tier", "nodes", "--state-dir", state)
    assert (other_tier.returncode, other_tier.stdout) == (1, "")
    assert re.fullmatch(
        f"error: the cluster in {state} is of tier api: stop it first, with: .* down\n", other_tier.stderr
    )

    assert cluster("down", "--state-dir", state).returncode == 0
    assert not state.exists()
    second = cluster("down", "--state-dir", state)
    assert (second.returncode, second.stdout) == (0, f"nothing to stop: no test cluster in {state}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["start"], "invalid choice: 'start'"),
        (["up", "--tier", "moon"], "invalid choice: 'moon'"),
        (["binaries", "--state-dir", "x"], "unrecognized arguments: --state-dir"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_screen(arguments: list[str], message: str) -> None:
    refused = cluster(*arguments)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert "Traceback" not in refused.stderr


def test_user_error_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBEBUILDER_ASSETS", "/no/such/folder")
    refused = cluster("up", "--state-dir", tmp_path)
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: KUBEBUILDER_ASSETS is /no/such/folder, which is not a folder")
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["reported at exit", "reported at once"])
def test_a_closed_pipe_causes_no_traceback(tmp_path: Path, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(COMMAND), "status", "--state-dir", str(tmp_path)]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, env=environment, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")
