"""The benchmarks of a step's time and of its growth run, and their sums are right. No time is asserted."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from growth import AXES, Plan, Point, multiplied_weights, work_of
from random_model import LlamaShape
from served_steps import ServedSteps
from shapes import SHAPES, model_folder
from step_anatomy import DISPATCH, PREPARING, SAMPLING, SCHEDULING, SENDING, Anatomy
from steps import Bench
from taps import Taps, fill_kv_cache, with_linears, without_computing

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "serving"
PNG = b"\x89PNG\r\n"
TINY = LlamaShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocabulary=256)


def rows_of(folder: Path, script: str, *arguments: str) -> list[dict[str, Any]]:
    command = [sys.executable, FOLDER / script, *arguments, "--threads", "1", "--json", folder / "rows.json"]
    done = subprocess.run(
        [*command, "--plot", folder / "plot.png"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    rows: list[dict[str, Any]] = json.loads((folder / "rows.json").read_text())["rows"]
    return rows


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with model_folder(TINY) as folder:
        yield Bench(folder, threads=1, dtype="float32", dummy=True, kv_cache_bytes=2**24)


def test_a_step_is_taken_apart_and_a_server_watched(tmp_path: Path) -> None:
    arguments = ("--model", "demo", "--sequences", "2", "--rounds", "1", "--steps", "2", "--seconds", "0.5")
    (row,) = rows_of(tmp_path, "step_breakdown.py", *arguments)
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    assert {"linear", "attention"} | {SAMPLING, SCHEDULING, PREPARING, DISPATCH, SENDING} <= row["parts"].keys()
    assert all(seconds > 0 for seconds in row["parts"].values())
    assert row["share_of_floor"] > 0 and row["bytes_per_token"] > 1
    assert row["served"]["streams"] == 2 and row["served"]["steps"] > 0
    assert row["served"]["parts"]["run"] < row["served"]["period_seconds"]


def test_growth_is_measured_along_one_axis_at_a_time(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "growth.py", "--quick", "--steps", "2", "--only", "context")
    assert [row["context"] for row in rows] == [128, 1024]
    assert {row["series"] for row in rows} == {"context"} and len({row["sequences"] for row in rows}) == 1
    assert all(row["tokens_per_second"] > 0 and row["allowed_tokens_per_second"] > 0 for row in rows)
    assert (tmp_path / "plot-context.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "plot.png").exists()


@pytest.mark.parametrize(("name", "shape"), SHAPES.items())
def test_a_shape_has_as_many_parameters_as_its_name_says(name: str, shape: LlamaShape) -> None:
    assert not shape.problems()
    assert shape.parameters / 1e6 == pytest.approx(float(name.removesuffix("M")), rel=0.12)


def test_series_share_what_is_not_on_their_axis() -> None:
    points = Plan().points()
    assert list(points) == list(AXES)
    assert [point.sequences for point in points["sequences"]][::6] == [1, 64]
    assert [point.context for point in points["context"]][::5] == [128, 4096]
    assert len({(point.sequences, point.context) for point in points["model"]}) == 1


def test_the_work_of_a_step_is_its_weights_once_and_each_sequence_s_keys_and_values() -> None:
    attention, mlp = 64 * (64 + 2 * 32) + 64 * 64, 3 * 64 * 128
    assert multiplied_weights(TINY) == 256 * 64 + 2 * (attention + mlp)
    alone, many = (work_of(TINY, Point(model="", sequences=n, context=100), itemsize=2) for n in (1, 10))
    assert alone.weight_bytes == many.weight_bytes == 2 * multiplied_weights(TINY)
    assert alone.kv_bytes == 2 * 2 * 2 * 32 * 100 and many.kv_bytes == 10 * alone.kv_bytes
    assert many.flops == pytest.approx(10 * alone.flops)


def test_every_linear_layer_is_found_and_none_counts_twice(bench: Bench) -> None:
    taps = Taps(bench.model)
    engine = bench.decoding(2, 20, 8)
    plain = bench.model.runner._model  # type: ignore[attr-defined]
    found: list[object] = []
    with_linears(plain, lambda linear: found.append(linear) or linear)  # type: ignore[func-returns-value]
    assert len(found) == 4 * TINY.layers + 1
    with taps.attached(), taps.recording() as calls:
        engine.step()
    assert len(calls["linear"]) == 4 * TINY.layers + 1 and len(calls["attention"]) == TINY.layers
    assert bench.model.runner._model is plain  # type: ignore[attr-defined]
    taps.clear()
    engine.step()
    assert not taps.seconds


def test_prompts_may_pass_without_a_model_and_leave_the_cache_as_it_was(bench: Bench) -> None:
    import torch

    fill_kv_cache(bench.model)
    caches = bench.model.runner._caches  # type: ignore[attr-defined]
    before = caches[0].keys.clone()
    assert before.unique().numel() > 100
    with without_computing(bench.model):
        engine = bench.decoding(2, 50, 4)
    assert torch.equal(caches[0].keys, before)
    engine.step()
    assert not torch.equal(caches[0].keys, before)


def test_the_share_of_the_floor_is_the_floor_over_the_step() -> None:
    anatomy = Anatomy(
        sequences=1,
        step_seconds=0.010,
        parts={},
        linear_floor=0.006,
        attention_floor=0.002,
        receive_seconds=0.0,
        bytes_per_token=3.0,
    )
    assert anatomy.share_of_floor == pytest.approx(0.8)


def test_time_between_steps_is_what_the_engine_s_own_parts_leave() -> None:
    served = ServedSteps(
        streams=4,
        steps=10,
        period_seconds=0.02,
        parts={"run": 0.015, "sample": 0.002},
        api_cpu_seconds=0.004,
        engine_cpu_seconds=0.03,
        tokens_per_second=200.0,
    )
    assert served.between_seconds == pytest.approx(0.003)
    assert served.api_cpu_per_token == pytest.approx(0.001)
