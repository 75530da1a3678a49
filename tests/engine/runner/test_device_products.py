"""The choice between products of few rows, over a stand-in for a GPU's driver that runs no kernel."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from quire_parity.engines import config_of
from quire_parity.shapes import shape

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from quire_engine.config import CacheOptions, DeviceOptions, ModelOptions, ParallelOptions, SchedulerOptions
from quire_engine.model.linear import TorchLinearBackend
from quire_engine.model.linear.skinny import TIMED_ROWS, ProductTimes, SkinnyLinearBackend
from quire_engine.runner import device_products
from quire_engine.runner.device.measuring import REPLAYS
from quire_engine.runner.device_products import (
    SizeTimes,
    may_time_products,
    product_sizes,
    times_in_words,
    with_fast_few_rows,
)
from quire_kernels.dispatch import INTERPRETED
from quire_kernels.triton_runtime.stand_in import StandIn, standing_in

pytestmark = pytest.mark.skipif(INTERPRETED, reason="compiles kernels")

CPU = torch.device("cpu")
SHAPE = shape(max_position_embeddings=96)
SIZES = ((256, 128), (128, 128), (512, 128), (128, 256), (320, 128))
BACKEND = TorchLinearBackend(torch.bfloat16)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with standing_in(90) as stand_in:
        yield stand_in


def test_a_kernel_with_other_results_is_never_used(stand_in: StandIn, tmp_path: Path) -> None:
    """Kernels run nothing here, so that the results differ."""
    backend, lines = with_fast_few_rows(BACKEND, SHAPE, CPU)
    assert backend is BACKEND and stand_in.launches >= len(SIZES)
    assert [line.partition(":")[0] for line in lines] == [f"{outputs} x {inputs}" for outputs, inputs in SIZES]
    assert all("torch, because quire's kernel failed: its results differ" in line for line in lines)
    assert not list(tmp_path.rglob("*.json")), "a problem is not kept"


def test_times_are_kept_and_decide(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(device_products, "largest_error", lambda found, expected: 0.0)
    times = iter([10.0, 10.0, 10.0, 10.0, 10.0, 8.0, 8.0, 8.0, 11.0, 11.0] * len(SIZES))
    monkeypatch.setattr(device_products, "_time", lambda accelerator, multiply, x, weights: next(times))
    backend, lines = with_fast_few_rows(BACKEND, SHAPE, CPU)
    assert isinstance(backend, SkinnyLinearBackend) and set(backend.rows) == set(SIZES)
    assert {count for count, chosen in enumerate(backend.rows[128, 256]) if chosen} == {1, 2, 3, 4}
    expected = "128 x 256: quire's kernel for 1, 2, 4 rows (µs of quire and torch by rows: 1: 8.0 and 10.0"
    assert lines[3].startswith(expected)
    launched = stand_in.launches
    again, same = with_fast_few_rows(BACKEND, SHAPE, CPU)  # ``times`` is exhausted
    assert isinstance(again, SkinnyLinearBackend) and again.rows == backend.rows and same == lines
    assert stand_in.launches == launched
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text().replace("10.0", "-1.0"))
    _, measured = with_fast_few_rows(BACKEND, SHAPE, CPU)  # a damaged file is measured again
    assert all("failed: " in line for line in measured)


def test_products_are_launched_as_graphs_of_all_copies(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_products, "largest_error", lambda found, expected: 0.0)
    monkeypatch.setattr(device_products, "_READ_BYTES", 4 * 128 * 128 * 2)
    times = device_products.time_products(device_products.make_accelerator(CPU), (128, 128), torch.bfloat16)
    assert times.problem == "" and len(times.skinny) == len(times.library) == len(TIMED_ROWS)
    # One comparison for each number of rows, then replays over all copies; a capture itself launches nothing here.
    assert stand_in.launches == len(TIMED_ROWS) * (1 + 4 * REPLAYS)


def test_other_types_and_modes_keep_the_library(stand_in: StandIn) -> None:
    wide = TorchLinearBackend(torch.float32)
    assert with_fast_few_rows(wide, SHAPE, CPU) == (wide, ()) and not stand_in.launches
    config = config_of(Path("model"), max_model_len=96, scheduler=SchedulerOptions(), cache=CacheOptions())
    assert may_time_products(config)
    assert not may_time_products(replace(config, device=DeviceOptions(deterministic=True)))
    assert not may_time_products(replace(config, model=ModelOptions(path=Path("model"), quantization="fp8")))
    assert not may_time_products(replace(config, parallel=ParallelOptions(tensor=2)))


def test_each_size_is_timed_once_and_named() -> None:
    assert product_sizes(SHAPE) == SIZES
    even = ProductTimes(library=(9.0,) * 5, skinny=(9.0,) * 5)
    assert times_in_words(SizeTimes(outputs=8, inputs=4, times=even)).startswith("8 x 4: torch (µs of quire and torch")
