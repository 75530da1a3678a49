"""The step benchmarks run, and their sums are correct. No time is asserted."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models.random_model import LlamaShape
from benchmarks.models.shapes import SHAPES, model_folder
from benchmarks.serving.probes import Probes, with_linears
from benchmarks.serving.step_breakdown import DISPATCH, PREPARING, SAMPLING, SCHEDULING, SENDING, Breakdown
from benchmarks.serving.steps import Bench

ROOT = Path(__file__).resolve().parents[2]
PNG = b"\x89PNG\r\n"
TINY = LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocabulary=256)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"benchmarks.serving.{script}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=ROOT)


def rows_of(folder: Path, script: str, *arguments: str, plot: bool = True) -> list[dict[str, Any]]:
    plots = ("--plot", str(folder / "plot.png")) if plot else ()
    done = run(script, *arguments, "--json", str(folder / "rows.json"), *plots)
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with model_folder(TINY) as folder:
        yield Bench(folder, threads=1, dtype="float32", dummy=True, kv_cache_bytes=2**24)


def test_step_is_broken_down_by_part(tmp_path: Path) -> None:
    arguments = ("--model", "demo", "--sequences", "2", "--rounds", "1", "--steps", "2", "--threads", "1")
    (row,) = rows_of(tmp_path, "step_breakdown", *arguments)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    assert {"linear", "attention"} | {SAMPLING, SCHEDULING, PREPARING, DISPATCH, SENDING} <= row["parts"].keys()
    assert all(seconds > 0 for seconds in row["parts"].values())
    assert row["share_of_floor"] > 0 and row["bytes_per_token"] > 1


@pytest.mark.parametrize(("name", "shape"), SHAPES.items())
def test_parameter_count_of_a_shape_matches_its_name(name: str, shape: LlamaShape) -> None:
    assert not shape.problems()
    assert shape.parameters / 1e6 == pytest.approx(float(name.removesuffix("M")), rel=0.12)


def test_every_linear_layer_is_found_and_none_counts_twice(bench: Bench) -> None:
    probes = Probes(bench.model)
    engine = bench.decoding(2, 20, 8)
    plain = bench.model.runner._model  # type: ignore[attr-defined]
    found: list[object] = []
    with_linears(plain, lambda linear: found.append(linear) or linear)  # type: ignore[func-returns-value]
    assert len(found) == 4 * TINY.layers + 1
    with probes.attached(), probes.recording() as calls:
        engine.step()
    assert len(calls["linear"]) == 4 * TINY.layers + 1 and len(calls["attention"]) == TINY.layers
    assert bench.model.runner._model is plain  # type: ignore[attr-defined]
    probes.clear()
    engine.step()
    assert not probes.seconds


def test_share_of_floor_is_floor_over_step() -> None:
    one = Breakdown(
        sequences=1,
        step_seconds=0.010,
        parts={},
        linear_alone=0.006,
        attention_alone=0.002,
        floor=0.005,
        receive_seconds=0.0,
        bytes_per_token=3.0,
    )
    assert one.share_of_floor == pytest.approx(0.5)


def test_host_cost_is_measured_by_part(tmp_path: Path) -> None:
    sizes = ("--running", "8", "16", "--queued", "0", "50", "--steps", "3", "--no-inputs")
    rows = rows_of(tmp_path, "host_cost", *sizes)
    assert [(row["running"], row["queued"]) for row in rows] == [(8, 0), (8, 50), (16, 0), (16, 50)]
    assert all(row[part] > 0 for row in rows for part in ("schedule", "commit", "encode"))


def test_the_cost_of_grammars_is_measured(tmp_path: Path) -> None:
    sizes = ("--sequences", "2", "--rounds", "1", "--steps", "4", "--threads", "1")
    (row,) = rows_of(tmp_path, "constrained", *sizes, plot=False)
    assert row["sequences"] == 2 and row["vocabulary"] == 4096
    assert row["throughput"] > 0 and row["apply_seconds"] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--steps", "0"), "'0' should be a whole number, 1 or more"),
        (("--plot", "plot.txt"), "plot.txt should end in one of .png, .svg, .pdf"),
        (("--json", "/proc/nothing/rows.json"), "cannot write /proc/nothing/rows.json"),
    ],
)
def test_wrong_option_is_refused_before_measuring(arguments: tuple[str, ...], problem: str) -> None:
    done = run("host_cost", *arguments)
    assert done.returncode == 2 and problem in done.stderr and "Traceback" not in done.stderr


def test_speculation_gives_the_required_outputs(tmp_path: Path) -> None:
    """The benchmark ends with an error if an answer is wrong; copies are accepted, misleading drafts are not."""
    results = tmp_path / "speculation.json"
    options = ("--shape", "5M", "--sequences", "2", "--answer", "40", "--runs", "1", "--json", str(results))
    done = run("speculation", *options)
    assert done.returncode == 0, done.stderr
    rows = {row["text"]: row for row in json.loads(results.read_text())["rows"]}
    assert rows["copy"]["accepted_share"] == 1.0 and rows["copy"]["tokens_per_step"] > 2.0
    assert rows["novel"]["tokens_per_step"] == pytest.approx(1.0, abs=0.05)
    assert rows["mislead"]["accepted_share"] == 0.0
