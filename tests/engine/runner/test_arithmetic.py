"""The dtype and the linear backend of a model on a CPU, and the file with the measured times."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_parity.shapes import shape

from quire_engine import kept
from quire_engine.config import EngineConfig
from quire_engine.cpu.limits import CpuLevel, CpuLimits
from quire_engine.model.linear import HalfLinearBackend, LinearBackend, TorchLinearBackend
from quire_engine.model.linear.selection import ROWS
from quire_engine.model.linear.timing import SHARING_ROWS, LayerSizes, layer_sizes, time_ways, timed_sizes
from quire_engine.runner import arithmetic
from quire_engine.runner.arithmetic import (
    Timings,
    choose_arithmetic,
    choose_way,
    close_types,
    float32_fits,
    likely_dtype,
    multiplies_bfloat16,
    resolve_gpu_dtype,
    slower_than_float32,
    ways_of,
)
from quire_engine.runner.attention_timing import time_attention
from quire_engine.runner.sharing import SharingTimes, are_plausible, shared_from, time_sharing
from quire_engine.runner.threads import SharedFrom

SHAPE = shape(vocab_size=1000, max_position_embeddings=1024, head_dim=16, hidden_size=64, intermediate_size=128)
BF16, F32 = TorchLinearBackend(torch.bfloat16), TorchLinearBackend(torch.float32)
HALF = HalfLinearBackend()
WAYS: tuple[LinearBackend, ...] = (BF16, F32, HALF)
Config = Callable[..., EngineConfig]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire" / "timings"


def times(bf16: float, float32: float, half: float) -> dict[str, tuple[float, ...]]:
    return {
        "torch bf16": (bf16, bf16, bf16),
        "torch float32": (float32, float32, float32),
        "quire fp16": (half, half, half),
    }


AVX512_BF16_ON_INTEL = {
    "torch bf16": (0.81, 2.11, 18.2),
    "torch float32": (1.08, 2.86, 13.2),
    "quire fp16": (0.80, 2.48, 12.5),
}
"""A layer of SmolLM2-135M with its attention, on a Xeon without its tiles. Served, float16 is 1.2 times faster."""


# --- the choice by times ---


@pytest.mark.parametrize(
    ("option", "linear", "chosen"),
    [
        ("auto", times(1.0, 2.0, 2.0), "torch bf16"),
        pytest.param("auto", times(2.0, 1.0, 1.0), "torch float32", id="the CPU is slow at bfloat16"),
        pytest.param("auto", times(1.05, 1.0, 2.0), "torch bf16", id="too little to leave the first"),
        pytest.param("auto", times(3.0, 2.0, 1.0), "quire fp16", id="half the bytes pay"),
        pytest.param("auto", AVX512_BF16_ON_INTEL, "quire fp16", id="prompts cost more than steps that decode"),
        pytest.param("bfloat16", times(9.0, 1.0, 1.0), "torch bf16", id="it was asked for"),
        pytest.param("float32", times(1.0, 9.0, 9.0), "torch float32", id="it was asked for, too"),
    ],
)
def test_fastest_backend_in_the_requested_dtype_is_chosen(
    option: Any, linear: dict[str, tuple[float, ...]], chosen: str
) -> None:
    assert choose_way(WAYS, linear, {}, option).name == chosen


def test_attention_decides_between_close_types() -> None:
    linear = times(1.0, 1.1, 2.0)
    assert close_types(WAYS, linear) == (torch.bfloat16, torch.float32)
    attention = {"bfloat16": (2.0, 2.0, 2.0), "float32": (0.5, 0.5, 0.5)}
    assert choose_way(WAYS, linear, attention, "auto").name == "torch float32"
    assert choose_way(WAYS, linear, {}, "auto").name == "torch bf16"


@pytest.mark.parametrize("linear", [times(1.0, 2.0, 2.0), times(3.0, 1.0, 1.0)])
def test_attention_is_not_timed_where_a_type_is_clearly_faster(linear: dict[str, tuple[float, ...]]) -> None:
    assert close_types(WAYS, linear) == ()


def test_a_type_is_compared_with_the_best_in_float32() -> None:
    assert slower_than_float32(WAYS, times(6.0, 3.0, 2.0), BF16) == pytest.approx(3.0)
    assert slower_than_float32((BF16,), times(6.0, 3.0, 2.0), BF16) == 1.0


def names(ways: tuple[LinearBackend, ...]) -> set[str]:
    return {way.name for way in ways}


def test_candidates_depend_on_the_dtype_option_and_the_cpu() -> None:
    assert "torch bf16" in names(ways_of("auto", fast_bfloat16=True))
    assert {way.dtype for way in ways_of("auto", fast_bfloat16=True)} == {torch.bfloat16, torch.float32}
    assert {way.dtype for way in ways_of("auto", fast_bfloat16=True, wide=False)} == {torch.bfloat16}
    assert {way.dtype for way in ways_of("auto", fast_bfloat16=False, wide=False)} == {torch.float32}
    assert HALF.name not in names(ways_of("float32", fast_bfloat16=False))
    assert {way.dtype for way in ways_of("float16", fast_bfloat16=True)} == {torch.float16, torch.float32}


@pytest.mark.parametrize(
    ("kv_cache_bytes", "available_bytes", "fits"),
    [
        (None, None, False),
        (None, 10 << 30, True),
        (None, 1 << 30, False),
        (1 << 20, 10 << 30, True),
        pytest.param((1 << 19) - 1, 10 << 30, False, id="the longest sequence needs more in 32 bits"),
        pytest.param(9 << 30, 10 << 30, False, id="the KV cache leaves too little"),
    ],
)
def test_float32_is_a_candidate_if_memory_suffices(
    kv_cache_bytes: int | None, available_bytes: int | None, fits: bool
) -> None:
    found = float32_fits(SHAPE, longest=1024, kv_cache_bytes=kv_cache_bytes, available_bytes=available_bytes)
    assert found == fits


@pytest.mark.parametrize(
    ("level", "fast"), [(None, False), ("avx2", False), ("avx512", False), ("avx512-bf16", True), ("amx", True)]
)
def test_cpu_level_decides_on_bfloat16_matmul(level: CpuLevel | None, fast: bool, engine_config: Config) -> None:
    config = replace(engine_config(Path("m")), cpu=CpuLimits(level=level, kernels=None, environment={}))
    assert multiplies_bfloat16(config) == fast


@pytest.mark.parametrize(
    ("option", "fast", "dtype"),
    [
        ("auto", True, "bfloat16"),
        ("auto", False, "float32"),
        ("float32", True, "float32"),
        ("float16", True, "float16"),
    ],
)
def test_dtype_without_timings_depends_on_option_and_cpu(option: Any, fast: bool, dtype: str) -> None:
    assert likely_dtype(option, fast_bfloat16=fast) == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("option", "quantization", "dtype"),
    [("auto", "none", "float16"), ("auto", "fp8", "bfloat16"), ("float32", "none", "float32")],
)
def test_gpu_dtype_depends_on_checkpoint_and_quantization(option: Any, quantization: Any, dtype: str) -> None:
    assert resolve_gpu_dtype(option, "float16", quantization) == getattr(torch, dtype)


# --- the times ---


def test_the_models_own_layer_is_timed() -> None:
    assert layer_sizes(SHAPE).weights == ((128, 64), (64, 64), (256, 64), (64, 128))
    assert timed_sizes(layer_sizes(SHAPE)) == layer_sizes(SHAPE)


def test_a_large_layer_is_timed_at_its_proportions() -> None:
    large = LayerSizes(weights=((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), layers=32)
    small = timed_sizes(large)
    assert small.count < 8 << 20
    assert small.weights[2][0] / small.weights[0][0] == pytest.approx(28672 / 6144, rel=0.1)
    assert all(outputs % 64 == 0 and inputs % 64 == 0 for outputs, inputs in small.weights)


def test_every_backend_is_timed_at_all_row_counts() -> None:
    threads = torch.get_num_threads()
    found = time_ways((F32, BF16), layer_sizes(SHAPE))
    assert list(found) == ["torch float32", "torch bf16"]
    assert all(len(taken) == len(ROWS) and min(taken) > 0.0 for taken in found.values())
    assert torch.get_num_threads() == threads


def test_slow_backend_is_not_timed_at_many_rows() -> None:
    class Hopeless(TorchLinearBackend):
        """A backend whose layers count their rows and take very long."""

        rows: list[int] = []

        def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, *, precise: bool = False) -> Any:
            layer = super().pack(weight, bias)

            def run(x: torch.Tensor) -> torch.Tensor:
                self.rows.append(len(x))
                for _ in range(3000):
                    layer(x)
                return layer(x)

            return run

    hopeless = Hopeless(torch.float32)
    hopeless.name = "hopeless"
    found = time_ways((F32, hopeless), layer_sizes(SHAPE))
    assert set(hopeless.rows) == {1}
    assert found["hopeless"][2] == pytest.approx(found["hopeless"][0] * 256)


def test_attention_is_timed_at_all_row_counts() -> None:
    taken = time_attention(SHAPE, torch.float32)
    assert len(taken) == len(ROWS) and min(taken) > 0.0


def test_timings_are_stored_and_the_choice_is_reported(
    engine_config: Config, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    config = engine_config(Path("m"), dtype="float32")
    first = choose_arithmetic(config, SHAPE, threads=1, available_bytes=None)
    assert first.timings is not None and len(list(cache.iterdir())) == 1
    assert first.backend.name in first.lines[0] and len(first.lines) == 1 + len(first.timings.linear)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the times are there")

    monkeypatch.setattr(arithmetic, "time_ways", fail)
    assert choose_arithmetic(config, SHAPE, threads=1, available_bytes=None).timings == first.timings
    with pytest.raises(AssertionError):
        choose_arithmetic(config, replace(SHAPE, hidden_size=128), threads=1, available_bytes=None)


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept_times: None,
        lambda kept_times: {**kept_times, "facts": ["another machine"]},
        lambda kept_times: {**kept_times, "linear": {"another way": [1.0, 1.0, 1.0]}},
        lambda kept_times: {**kept_times, "linear": {name: [1.0] for name in kept_times["linear"]}},
        lambda kept_times: {**kept_times, "linear": {name: [0.0] * 3 for name in kept_times["linear"]}},
        lambda kept_times: {**kept_times, "linear": {name: ["a"] * 3 for name in kept_times["linear"]}},
        lambda kept_times: {**kept_times, "linear": 3},
    ],
)
def test_damaged_timings_are_measured_again(
    damage: Callable[[dict[str, Any]], object], engine_config: Config, cache: Path
) -> None:
    config = engine_config(Path("m"), dtype="float32")
    choose_arithmetic(config, SHAPE, threads=1, available_bytes=None)
    (file,) = cache.iterdir()
    file.write_text(json.dumps(damage(json.loads(file.read_text()))))
    found = choose_arithmetic(config, SHAPE, threads=1, available_bytes=None)
    assert found.timings is not None and kept.read("timings", found.timings.facts, Timings) == found.timings


@pytest.mark.parametrize("rows", [[], [[4.0, 2.0]]], ids=["none", "one"])
def test_sharing_times_of_too_few_rows_are_measured_again(
    rows: list[list[float]], engine_config: Config, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    whole: SharingTimes = {"spinning": ((4.0, 2.0),) * len(SHARING_ROWS), "asleep": ((4.0, 2.0),) * len(SHARING_ROWS)}
    monkeypatch.setattr(arithmetic, "time_sharing", lambda *_, **__: whole)
    config = engine_config(Path("m"), dtype="float32")
    choose_arithmetic(config, SHAPE, threads=2, available_bytes=None)
    (file,) = cache.iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "sharing": {"spinning": rows, "asleep": rows}}))
    found = choose_arithmetic(config, SHAPE, threads=2, available_bytes=None)
    assert found.timings is not None and found.timings.sharing == whole


def test_slow_dtype_is_served_with_a_warning_about_the_factor(
    engine_config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def slow(ways: tuple[LinearBackend, ...], _: LayerSizes) -> dict[str, tuple[float, ...]]:
        return {way.name: (1.0,) * 3 if way.dtype == torch.float32 else (7.0,) * 3 for way in ways}

    monkeypatch.setattr(arithmetic, "time_ways", slow)
    with caplog.at_level(logging.WARNING):
        found = choose_arithmetic(engine_config(Path("m"), dtype="bfloat16"), SHAPE, threads=1, available_bytes=None)
    assert found.dtype == torch.bfloat16
    (record,) = caplog.records
    assert record.args == ("bfloat16", pytest.approx(7.0))
    caplog.clear()
    choose_arithmetic(engine_config(Path("m"), dtype="auto"), SHAPE, threads=1, available_bytes=10 << 30)
    assert not caplog.records


@pytest.mark.parametrize("changes", [{"quantization": "int8"}, {"deterministic": True}])
def test_no_timing_runs_if_there_is_one_candidate(changes: dict[str, Any], engine_config: Config) -> None:
    deterministic = changes.pop("deterministic", False)
    config = engine_config(Path("m"), **changes)
    config = replace(config, device=replace(config.device, deterministic=deterministic))
    assert choose_arithmetic(config, SHAPE, threads=1, available_bytes=None).timings is None


# --- threads ---


@pytest.mark.parametrize(
    ("spinning", "expected"),
    [
        (((4.0, 2.0),) * 4, 1),
        (((1.0, 2.0), (1.0, 1.0), (4.0, 2.0), (8.0, 4.0)), 16),
        pytest.param(((4.0, 2.0), (1.0, 2.0), (4.0, 2.0), (8.0, 4.0)), 16, id="one lucky time does not count"),
        pytest.param(((1.0, 2.0),) * 4, 563, id="beyond what was timed"),
    ],
)
def test_thread_sharing_starts_where_it_stays_faster(spinning: tuple[tuple[float, float], ...], expected: int) -> None:
    found = shared_from({"spinning": spinning, "asleep": ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), (4.0, 2.0))})
    assert found == SharedFrom(spinning=expected, asleep=64)


def test_sharing_threshold_is_none_without_timings() -> None:
    assert shared_from({}) is None


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        ({"spinning": (6.0, 3.7), "asleep": (6.9, 3.7)}, True),
        ({"spinning": (6.1, 5.9), "asleep": (6.9, 3.7)}, False),
        ({"spinning": (6.1, 3.7), "asleep": (6.9, 7.0)}, False),
        pytest.param({"spinning": (0.1, 0.1), "asleep": (0.1, 0.2)}, True, id="a small layer may not gain"),
    ],
)
def test_a_long_layer_without_a_gain_is_implausible(longest: dict[Any, tuple[float, float]], expected: bool) -> None:
    times: SharingTimes = {wait: ((0.1, 0.2), pair) for wait, pair in longest.items()}
    assert are_plausible(times) is expected


def test_sharing_is_timed_for_both_kinds_of_waits() -> None:
    threads = torch.get_num_threads()
    found = time_sharing(F32, layer_sizes(SHAPE), threads=2)
    assert not found or {name: len(pairs) for name, pairs in found.items()} == {
        "spinning": len(SHARING_ROWS),
        "asleep": len(SHARING_ROWS),
    }
    torch.set_num_threads(threads)
