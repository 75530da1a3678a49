"""The init container that the operator renders puts the model where the engine reads it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fetch_support.hub_stub import HubStub, safetensors, serving
from rendering import workload
from specs import valid_spec

WEIGHTS = safetensors(1000)
FILES = {"config.json": json.dumps({"a": 1}).encode(), "model.safetensors": WEIGHTS, "tokenizer.json": b"{}"}


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    with serving(HubStub(repository="org/tiny", files=FILES)) as address:
        yield {
            "HF_ENDPOINT": address,
            "HF_TOKEN": "hf_secret",
            "HF_HUB_DISABLE_XET": "1",
            "HOME": str(tmp_path / "home"),
            "PATH": "/usr/bin:/bin",
        }


def run(argv: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_engine.fetch", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_init_container_stores_the_model_where_the_engine_reads(environment: dict[str, str], tmp_path: Path) -> None:
    spec = valid_spec(model={"source": "hf://org/tiny@main", "cache": {"claimName": "c"}})
    made = workload(spec)["template"]["spec"]
    (init,), (engine,) = made["initContainers"], made["containers"]
    volume = tmp_path / "volume"
    volume.mkdir()
    argv = [argument.replace("/models", str(volume)) for argument in init["args"]]
    for _ in range(2):  # the second pod on the same claim finds it complete
        done = run(argv, environment)
        assert done.returncode == 0, done.stderr
    moved = volume.rename(tmp_path / "as-the-engine-mounts-it")
    folder = moved / Path(engine["args"][1]).relative_to("/models")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").exists()


def test_missing_optional_draft_does_not_stop_the_pod(environment: dict[str, str], tmp_path: Path) -> None:
    draft = str(tmp_path / "draft")
    done = run(["hf://org/none", "--to", draft, "--optional"], environment)
    assert done.returncode == 0, done.stderr
    assert "no model org/none" in done.stderr and "continuing without it" in done.stdout
    assert not (tmp_path / "draft").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("hf://org/none", "no model org/none"),
        ("file:///x", "is not a source to download from"),
        ("nonsense", "is not a source to download from"),
    ],
)
def test_failed_fetch_is_reported_in_the_last_lines(
    environment: dict[str, str], tmp_path: Path, source: str, says: str
) -> None:
    done = run([source, "--to", str(tmp_path / "model")], environment)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_existing_folder_is_not_replaced(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run(["hf://org/tiny", "--to", str(tmp_path / "model")], environment)
    assert done.returncode == 2 and "exists already" in done.stderr
