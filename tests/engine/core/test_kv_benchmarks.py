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
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if "if __name__ ==" in path.read_text(encoding="utf-8"))
PNG = b"\x89PNG\r\n"


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, FOLDER / script, *arguments], capture_output=True, text=True, timeout=200)


def rows_of(script: str, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    outputs = ("--json", str(folder / "rows.json"), "--plot", str(folder / "rows.png"))
    done = run(script, *outputs, *arguments)
    assert done.returncode == 0, done.stderr
    assert (folder / "rows.png").read_bytes().startswith(PNG)
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return rows


@pytest.fixture
def tiny_model(tmp_path: Path) -> tuple[str, ...]:
    """The options of a benchmark that make it run a model of no size."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_LLAMA))
    return ("--model", str(model), "--load-format", "dummy", "--threads", "1", "--kv-cache-mib", "8")


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


def test_three_ways_of_batching_do_the_same_work_and_continuous_needs_the_fewest_steps(
    tmp_path: Path, tiny_model: tuple[str, ...]
) -> None:
    continuous, trimmed, padded = rows_of(
        *("continuous_vs_static.py", tmp_path, *tiny_model),
        *("--requests", "6", "--batch-size", "3", "--longest", "8", "--runs", "1"),
    )
    assert [row["way"] for row in (continuous, trimmed, padded)] == ["continuous", "static, trimmed", "static, padded"]
    assert continuous["useful_tokens"] == trimmed["useful_tokens"] == padded["useful_tokens"] > 0
    assert continuous["steps"] <= trimmed["steps"] == padded["steps"]


def test_shared_prefixes_are_found_as_far_as_they_fill_blocks(tmp_path: Path, tiny_model: tuple[str, ...]) -> None:
    rows = rows_of(
        *("prefix_ttft.py", tmp_path, *tiny_model, "--prompt", "200", "--shares", "0", "50", "100", "--runs", "1")
    )
    # Of a prompt that is there as a whole the last token is computed again, and with it its block.
    assert [(row["share"], row["found_tokens"]) for row in rows] == [(0.0, 0), (0.5, 96), (1.0, 192)]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["warm_seconds"] / row["cold_seconds"])


def test_hashing_is_a_part_of_each_step(tmp_path: Path, tiny_model: tuple[str, ...]) -> None:
    rows = rows_of("prefix_cost.py", tmp_path, *tiny_model, "--requests", "2", "--runs", "1")
    mixes = ["decode-heavy", "prefill-heavy"]
    assert [(row["runner"], row["mix"]) for row in rows] == [
        (runner, mix) for runner in ("no model", "model") for mix in mixes
    ]
    for row in rows:
        assert 0 < row["inside_seconds"] < row["step_seconds"]
        assert row["share"] == pytest.approx(row["inside_seconds"] / row["step_seconds"])
        assert row["calls"] >= 4, "each request is looked up and published"
    # The same requests, whoever runs them.
    assert rows[1]["tokens"] > 2 * 512 and rows[3]["tokens"] > 2 * 512


def test_chat_finds_what_was_said_before(tmp_path: Path, tiny_model: tuple[str, ...]) -> None:
    with_caching, without = rows_of(
        *("prefix_chat.py", tmp_path, *tiny_model, "--conversations", "2", "--users", "2"),
        *("--turns", "3", "--system-prompt", "64", "--runs", "1"),
    )
    assert with_caching["caching"] and not without["caching"] and without["found_tokens"] == 0
    assert with_caching["answer_tokens"] == without["answer_tokens"] > 0
    assert with_caching["prompt_tokens"] == without["prompt_tokens"]
    saved = without["computed_tokens"] - with_caching["computed_tokens"]
    assert saved == with_caching["found_tokens"] > 0
    assert with_caching["hit_rate"] == pytest.approx(with_caching["found_tokens"] / with_caching["prompt_tokens"])


def test_every_request_completes_by_every_way_of_preemption(tmp_path: Path, tiny_model: tuple[str, ...]) -> None:
    rows = rows_of("preemption.py", tmp_path, *tiny_model, "--requests", "8", "--mixes", "short", "--runs", "1")
    recompute, swap, auto, no_swap = rows
    assert [row["way"] for row in rows] == ["recompute", "swap", "auto", "no swap"]
    assert all(row["completed"] == 8 for row in rows)
    assert all(sum(row["preemptions"].values()) > 0 for row in (recompute, swap, auto))
    assert set(recompute["preemptions"]) == set(no_swap["preemptions"]) <= {"recompute:forced"}
    assert recompute["recomputed_tokens"] > 0 == recompute["swapped_out_blocks"]
    assert 0 < swap["swapped_in_blocks"] <= swap["swapped_out_blocks"] and swap["swap_seconds"] > 0
    assert recompute["cache_blocks"] == swap["cache_blocks"] < recompute["wanted_blocks"] / 3
    assert no_swap["cache_blocks"] == swap["cache_blocks"] + swap["swap_blocks"] and no_swap["swap_blocks"] == 0


def test_fair_sharing_adds_at_most_one_service_time_and_first_come_first_served_adds_the_queue(tmp_path: Path) -> None:
    rows = {row["policy"]: row for row in rows_of("fairness.py", tmp_path, "--queued", "60")}
    assert list(rows) == ["alone", "fcfs", "priority", "fair"]
    assert rows["fair"]["requests"] == rows["alone"]["requests"] == 10
    assert rows["alone"]["added_seconds"] == pytest.approx(0.0)
    # The clock is simulated: these are exact, on every machine.
    assert rows["fair"]["added_services"] <= 1.0
    assert rows["fcfs"]["added_services"] > 5.0


@pytest.mark.parametrize(
    ("script", "arguments", "problem"),
    [
        ("waste.py", ("--trace", "nowhere.csv"), "cannot read the trace"),
        ("waste.py", ("--requests", "0"), "'0' should be a whole number, 1 or more"),
        ("waste.py", ("--plot", "waste.txt"), "waste.txt should end in one of .png, .svg, .pdf"),
        ("waste.py", ("--json", "/proc/nothing/rows.json"), "cannot write /proc/nothing/rows.json"),
        ("prefix_ttft.py", ("--shares", "130"), "'130' should be a whole number of percent, 0 to 100"),
        ("prefix_ttft.py", ("--model", "nowhere"), "nowhere"),
        ("preemption.py", ("--memory", "1.5"), "'1.5' should be above 0 and at most 1"),
        ("fairness.py", ("--queued", "3"), "otherwise nothing waits"),
        ("fairness.py", ("--queued", "17", "--heavy-prompt", "9", "--heavy-answer", "1"), "use a larger --queued"),
    ],
)
def test_mistake_is_told_without_a_traceback(script: str, arguments: tuple[str, ...], problem: str) -> None:
    done = run(script, *arguments)
    assert done.returncode != 0 and problem in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_what_it_measures(script: str) -> None:
    done = run(script, "--help")
    assert done.returncode == 0 and "usage:" in done.stdout and len(done.stdout) > 500
    assert "--json" in done.stdout and "--plot" in done.stdout


def test_readme_names_every_benchmark() -> None:
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPTS) >= 8 and all(f"benchmarks/kv/{script}" in readme for script in SCRIPTS)
