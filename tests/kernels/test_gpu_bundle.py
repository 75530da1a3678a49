"""The bundle for a GPU machine is complete: unpacked elsewhere, its tests are found and its commands start."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire_kernels.dispatch import INTERPRETED

ROOT = Path(__file__).parents[2]
COMMANDS = ("benchmarks.kernels.run", "benchmarks.serving.on_device")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    environment = {**os.environ, "BIN": str(Path(sys.executable).parent)}
    pack = ["bash", "benchmarks/gpu_bundle.sh", str(folder / "bundle.tar.gz")]
    subprocess.run(pack, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=120)
    subprocess.run(["tar", "xzf", "bundle.tar.gz"], cwd=folder, check=True, timeout=60)
    return folder / "gpu-bundle"


def run(bundle: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run as on_gpu.sh does, but interpreted; a missing module must not be found in this checkout."""
    there = ("kernels/src", "engine/src", "tests/support", "site")
    environment = {
        **os.environ,
        "PYTHONPATH": ":".join(str(bundle / folder) for folder in there),
        "TRITON_INTERPRET": "1",
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=bundle,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.skipif(INTERPRETED, reason="starts such a process itself")
@pytest.mark.parametrize(
    ("tests", "confined"),
    [
        ("tests/kernels/ops", "tests/kernels"),
        ("tests/kernels/triton", "tests/kernels"),
        ("tests/engine/triton", "tests/engine/triton"),
    ],
)
def test_every_test_of_the_bundle_is_found_and_can_be_imported(bundle: Path, tests: str, confined: str) -> None:
    pytest.importorskip("triton", reason="torch's CPU build comes without triton")
    options = ("-c", "benchmarks/on_gpu.ini", "--rootdir", str(bundle), "-p", "no:cacheprovider", "--collect-only")
    result = run(bundle, "-m", "pytest", *options, "--confcutdir", confined, tests)
    assert result.returncode == 0, result.stdout
    for file in (bundle / tests).glob("test_*.py"):
        assert f"{tests}/{file.name}" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="starts such a process itself")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_of_the_bundle_prints_its_usage(bundle: Path, command: str) -> None:
    result = run(bundle, "-m", command, "--help")
    assert result.returncode == 0 and result.stdout.startswith(f"usage: {command.rpartition('.')[2]}.py"), result.stderr
