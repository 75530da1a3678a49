"""The benchmarks of the KV cache and the scheduler run, and print what they promise. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "benchmarks" / "kv"

TINY_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, timeout=200)


def rows_of(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = run(script, "--json", str(folder / "rows.json"), *arguments)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return rows


def test_paging_wastes_at_most_one_percent_of_the_memory_on_the_trace(tmp_path: Path) -> None:
    paged, *reserved = rows_of("waste.py", tmp_path, "--requests", "150", "--block-sizes", "16")
    assert paged["allocation"] == "paged, blocks of 16"
    assert paged["waste"] <= 0.01
    assert [row["allocation"].partition(":")[0] for row in reserved] == ["reserved"] * 3
    assert all(row["waste"] > paged["waste"] for row in reserved)


def test_host_cost_is_told_by_part(tmp_path: Path) -> None:
    rows = rows_of(
        "host_cost.py", tmp_path, "--running", "8", "16", "--queued", "0", "50", "--steps", "3", "--no-inputs"
    )
    assert [(row["running"], row["queued"]) for row in rows] == [(8, 0), (8, 50), (16, 0), (16, 50)]
    assert all(row[part] > 0 for row in rows for part in ("schedule", "commit", "encode"))


def test_three_ways_of_batching_are_compared_on_a_real_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    rows = rows_of(
        *("continuous_vs_static.py", tmp_path, "--model", str(model), "--load-format", "dummy"),
        *("--requests", "6", "--batch-size", "3", "--longest", "8", "--runs", "1", "--threads", "1"),
        *("--kv-cache-mib", "8"),
    )
    assert [row["way"] for row in rows] == ["continuous", "static, trimmed", "static, padded"]


def test_missing_trace_is_told_without_a_traceback() -> None:
    done = run("waste.py", "--trace", "nowhere.csv")
    assert done.returncode != 0 and "cannot read the trace" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("script", ["waste.py", "host_cost.py", "continuous_vs_static.py"])
def test_help_says_what_it_measures(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout and len(done.stdout) > 500
