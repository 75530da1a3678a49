"""Kernels that are compiled without a GPU are found again by a start with other sizes, in another cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime.shipped import VARIABLE, link_shipped_kernels

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles kernels")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 1,
}


def precompile(model: Path, cache: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire_engine.runner.device.precompile", "--capability", "90", *options]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [*command, "--model", str(model)], env=environment, capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.timeout(1200)
def test_a_start_finds_every_kernel_compiled_in_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, shipped, own = tmp_path / "model", tmp_path / "shipped", tmp_path / "own"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    filled = precompile(model, shipped)
    assert filled.returncode == 0 and " 0 in the cache" in filled.stdout, filled.stderr
    (own / "another").mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(shipped))
    assert link_shipped_kernels(cache=own) == len(list(shipped.iterdir())) > 10
    assert link_shipped_kernels(cache=own) == 0, "all are there"
    checked = precompile(model, own, "--check")
    assert checked.returncode == 0 and ": 0 compiled" in checked.stdout, checked.stdout + checked.stderr
    missing = next(path for path in own.iterdir() if list(path.glob("_rms_norm_kernel*.cubin")))
    missing.unlink()
    found = precompile(model, own, "--check")
    assert found.returncode == 1 and ": 1 compiled" in found.stdout, found.stdout


def test_no_kernel_is_linked_without_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert link_shipped_kernels(cache=tmp_path) == 0 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("ships", [True, False])
def test_links_to_kernels_of_an_earlier_image_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ships: bool
) -> None:
    shipped, cache = tmp_path / "shipped", tmp_path / "cache"
    for folder in (shipped / "one", shipped / "other", cache / "own"):
        folder.mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(shipped))
    assert link_shipped_kernels(cache=cache) == 2
    (shipped / "other").rmdir()
    if not ships:
        monkeypatch.delenv(VARIABLE)
    assert link_shipped_kernels(cache=cache) == 0
    assert sorted(path.name for path in cache.iterdir()) == ["one", "own"]
