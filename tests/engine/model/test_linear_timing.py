"""The start-up benchmark of linear backends and the file that keeps its times."""

import json
from pathlib import Path

import pytest
import torch

from quire_engine.model.linear import LinearBackend, TorchLinearBackend, timing, timing_cache

NAMES = ("onednn bf16", "torch bf16")
TIMES = {"onednn bf16": (0.2, 2.0), "torch bf16": (0.3, 2.5)}
CPUINFO = "processor : 0\nmodel name : Some CPU\nflags : avx2 fma\nbogomips : 5000\n\nprocessor : 1\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "quire" / "linear"


def test_times_come_back_as_they_were_written(cache: Path) -> None:
    assert timing_cache.read("a", NAMES, 2) is None
    timing_cache.write("a", TIMES)
    assert timing_cache.read("a", NAMES, 2) == TIMES
    assert [file.name for file in cache.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        json.dumps({"onednn bf16": [0.2, 2.0]}),
        json.dumps({**TIMES, "another": [0.1, 1.0]}),
        json.dumps({**TIMES, "torch bf16": [0.3]}),
        json.dumps({**TIMES, "torch bf16": [0.3, 0.0]}),
        json.dumps({**TIMES, "torch bf16": [0.3, -1.0]}),
        json.dumps({**TIMES, "torch bf16": [0.3, "fast"]}),
        json.dumps({**TIMES, "torch bf16": None}),
        '{"onednn bf16": [0.2, 2.0], "torch bf16": [NaN, 1.0]}',
    ],
)
def test_a_file_that_is_not_whole_or_of_other_backends_does_not_count(text: str, cache: Path) -> None:
    cache.mkdir(parents=True)
    (cache / "a.json").write_text(text)
    assert timing_cache.read("a", NAMES, 2) is None


def test_a_folder_that_cannot_be_made_costs_nothing_but_the_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    timing_cache.write("a", TIMES)
    assert timing_cache.read("a", NAMES, 2) is None


def test_the_key_tells_apart_all_that_the_times_depend_on(tmp_path: Path) -> None:
    first, faster = tmp_path / "first", tmp_path / "faster"
    first.write_text(CPUINFO)
    faster.write_text(CPUINFO.replace("fma", "fma avx512f"))
    keys = [
        timing_cache.key(dtype="float32", width=512, threads=2, cpuinfo=first),
        timing_cache.key(dtype="bfloat16", width=512, threads=2, cpuinfo=first),
        timing_cache.key(dtype="float32", width=1024, threads=2, cpuinfo=first),
        timing_cache.key(dtype="float32", width=512, threads=4, cpuinfo=first),
        timing_cache.key(dtype="float32", width=512, threads=2, cpuinfo=faster),
        timing_cache.key(dtype="float32", width=512, threads=2, cpuinfo=tmp_path / "absent"),
    ]
    assert len(set(keys)) == len(keys)
    first.write_text(CPUINFO.replace("5000", "5001"))
    assert timing_cache.key(dtype="float32", width=512, threads=2, cpuinfo=first) == keys[0]


def test_layers_are_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backends: tuple[LinearBackend, ...] = (TorchLinearBackend(torch.float32),)
    taken = timing.take_times(backends, dtype=torch.float32, width=64, threads=1)
    assert list(taken) == ["torch float32"] and all(milliseconds > 0.0 for milliseconds in taken["torch float32"])
    assert len(taken["torch float32"]) == len(timing.ROWS)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the times are there")

    monkeypatch.setattr(timing, "measure", fail)
    assert timing.take_times(backends, dtype=torch.float32, width=64, threads=1) == taken


@pytest.mark.parametrize(("hidden", "width"), [(1, 256), (256, 256), (576, 1024), (8192, 1024)])
def test_a_few_layers_stand_for_those_of_all_models(hidden: int, width: int) -> None:
    assert timing.layer_width(hidden) == width
