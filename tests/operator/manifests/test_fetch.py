"""What the pod's init container is told to run, run: the model is where the engine is told to look for it."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from quire_local.hub_stub import HubStub, safetensors, serving

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
    command = [sys.executable, "-m", "quire_cli.app", *argv]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_the_init_container_puts_the_model_where_the_engine_looks(
    pod: Callable[..., Any], environment: dict[str, str], tmp_path: Path
) -> None:
    made = pod(model={"source": "hf://org/tiny@main", "cache": {"claimName": "c"}})
    (init,), (engine,) = made["initContainers"], made["containers"]
    volume = tmp_path / "volume"
    volume.mkdir()
    argv = [argument.replace("/models", str(volume)) for argument in init["args"]]
    for _ in range(2):  # the second pod on the same claim finds it done
        done = run(argv, environment)
        assert done.returncode == 0, done.stderr
    moved = volume.rename(tmp_path / "as-the-engine-mounts-it")
    folder = moved / Path(engine["args"][1]).relative_to("/models")
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert (folder / "config.json").exists()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("hf://org/none", "no model org/none"),
        ("file:///x", "is nothing to download"),
        ("nonsense", "is nothing to download"),
    ],
)
def test_what_can_not_be_fetched_is_told_in_the_last_lines(
    environment: dict[str, str], tmp_path: Path, source: str, says: str
) -> None:
    done = run(["fetch", source, "--to", str(tmp_path / "model")], environment)
    assert done.returncode == 2
    assert says in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "model").exists()


def test_a_folder_that_is_there_is_not_replaced(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run(["fetch", "hf://org/tiny", "--to", str(tmp_path / "model")], environment)
    assert done.returncode == 2 and "is there already" in done.stderr
