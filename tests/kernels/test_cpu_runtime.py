"""The runtime of the CPU ops: exponential, rounding to storage, threads, the cache of machine code."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numba import carray, njit

from quire_kernels.cpu_runtime import LayerMemory, Worker, float_bits, launch, recorded
from quire_kernels.cpu_runtime.compile_lock import CompileLocks
from quire_kernels.cpu_runtime.scalars import (
    as_int64_pointer,
    exp_float32,
    fetch_add,
    float_from_bits,
    int64_pointer,
    storage_pointer,
    to_float32,
    to_storage,
)
from quire_kernels.dispatch import implementation
from quire_kernels.errors import UnsupportedDeviceError


@njit
def _exp_all(values: Any) -> Any:
    out = np.empty_like(values)
    for i in range(values.size):
        out[i] = exp_float32(values[i])
    return out


def _round_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 6)
    while True:
        i = fetch_add(counter, 0)
        if i >= a[1]:
            break
        source, target = carray(storage_pointer(block, a[3]), a[1]), carray(storage_pointer(block, a[4]), a[1])
        target[i] = to_storage(to_float32(source[i]) * np.float32(float_from_bits(a[5])), source[i])


def _count_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 4)
    while True:
        i = fetch_add(counter, 0)
        if i >= a[1]:
            break
        fetch_add(int64_pointer(a[3]), i)
        if i == 17:
            a[2] = 9


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = np.linspace(-87.0, 88.0, 200_001, dtype=np.float32)
    expected = np.exp(x.astype(np.float64))
    assert np.max(np.abs(_exp_all(x) - expected) / np.spacing(expected.astype(np.float32))) < 2.0


@pytest.mark.parametrize(("x", "expected"), [(-np.inf, 0.0), (-88.0, 0.0), (-1e30, 0.0), (0.0, 1.0), (89.0, np.inf)])
def test_the_exponential_at_its_ends(x: float, expected: float) -> None:
    assert _exp_all(np.array([x], dtype=np.float32))[0] == expected


def test_results_are_rounded_to_storage_as_torch_rounds(dtype: torch.dtype) -> None:
    worker = Worker(_round_worker)
    values = torch.cat(
        (torch.randn(500) * 1e3, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.00390625]))
    )
    source, found = values.to(dtype), torch.empty(values.shape, dtype=dtype)
    arguments = (source.data_ptr(), found.data_ptr(), float_bits(1.0 / 3.0))
    launch(worker, dtype, len(values), arguments, parallel=False)
    expected = (source.float() * torch.tensor(1.0 / 3.0, dtype=torch.float32)).to(dtype)
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("parallel", [True, False])
def test_every_item_runs_once_and_errors_are_reported(parallel: bool, threads: int) -> None:
    worker = Worker(_count_worker)
    done = np.zeros(1000, dtype=np.int64)
    assert launch(worker, torch.float32, 1000, (done.ctypes.data,), parallel=parallel) == 9
    assert (done == 1).all()
    assert launch(worker, torch.float32, 17, (done.ctypes.data,), parallel=parallel) == 0


def test_calling_thread_works_alone_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = import_module("quire_kernels.cpu_runtime.workers")
    monkeypatch.setattr(workers, "parallel_region", lambda: None)
    done = np.zeros(100, dtype=np.int64)
    launch(Worker(_count_worker), torch.float32, 100, (done.ctypes.data,), parallel=True)
    assert (done == 1).all()


def _double_worker(block: Any) -> None:
    counter = as_int64_pointer(block)
    a = carray(counter, 4)
    while True:
        i = fetch_add(counter, 0)
        if i >= a[1]:
            break
        value = carray(int64_pointer(a[3]), a[1])
        value[i] = 2 * value[i] + 1
        if value[i] > 100:
            a[2] = 5


_DOUBLE = Worker(_double_worker)


def _enter_worker(block: Any) -> None:
    """Count the threads that run this."""
    fetch_add(int64_pointer(carray(as_int64_pointer(block), 4)[3]), 0)


def _double(values: Any, *, keeps: bool = True, refuse: Any = None, threads_at: int | None = None) -> int:
    return launch(
        _DOUBLE,
        torch.float32,
        len(values),
        (values.ctypes.data,),
        parallel=True,
        keeps=(values,) if keeps else None,
        refuse=refuse,
        threads_at=threads_at,
    )


def test_recorded_launches_run_in_order_and_as_often_as_needed(threads: int) -> None:
    values = np.arange(40, dtype=np.int64)
    with recorded(LayerMemory()) as recording:
        assert [_double(values), _double(values)] == [0, 0]
    assert values[3] == 3
    recording.run()
    assert (values == 4 * np.arange(40) + 3).all()
    recording.run()
    assert (values == 16 * np.arange(40) + 15).all()
    _double(values)
    assert values[0] == 31, "a launch after the scope runs at once"


def test_recorded_launch_reads_the_number_of_its_threads_in_each_run() -> None:
    count, entered = np.ones(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    arguments = (entered.ctypes.data,)
    with recorded(LayerMemory()) as recording:
        launch(
            Worker(_enter_worker),
            torch.float32,
            9,
            arguments,
            parallel=True,
            keeps=(entered, count),
            threads_at=count.ctypes.data,
        )
    recording.run()
    assert entered == [1]
    count[0] = 2
    recording.run()
    assert entered == [3]


def test_launch_whose_result_is_read_at_once_is_not_recorded() -> None:
    with pytest.raises(AssertionError, match="cannot be recorded"), recorded(LayerMemory()):
        _double(np.ones(5, dtype=np.int64), keeps=False)


def test_recorded_launches_all_run_before_an_error_is_raised() -> None:
    refused: list[int] = []

    def refuse(code: int) -> None:
        refused.append(code)
        raise ValueError(code)

    values = np.full(3, 60, dtype=np.int64)
    with recorded(LayerMemory()) as recording:
        _double(values, refuse=refuse)
        _double(values, refuse=refuse)
    with pytest.raises(ValueError, match="5"):
        recording.run()
    assert refused == [5] and (values == 243).all()
    values[:] = 1
    recording.run()
    assert refused == [5] and (values == 7).all(), "the error of the run before is forgotten"


def test_launches_run_at_once_after_an_error_in_their_scope() -> None:
    values = np.ones(3, dtype=np.int64)
    with pytest.raises(KeyError), recorded(LayerMemory()):
        _double(values)
        raise KeyError
    assert (values == 1).all()
    _double(values)
    assert (values == 3).all()


def test_results_of_a_layer_last_until_the_next_one_has_ended() -> None:
    memory = LayerMemory()
    places: list[list[int]] = []
    for _ in range(4):
        memory.next_layer()
        results = [memory.empty((3, 5), torch.bfloat16), memory.empty((1 << 20,), torch.float32)]
        results += [memory.empty((7,), torch.float32)]
        assert [result.shape for result in results] == [(3, 5), (1 << 20,), (7,)]
        begins = [result.data_ptr() for result in results]
        ends = [begin + result.numel() * result.element_size() for begin, result in zip(begins, results, strict=True)]
        assert all(begin % 64 == 0 for begin in begins)
        ordered = sorted(zip(begins, ends, strict=True))
        assert all(end <= begin for (_, end), (begin, _) in zip(ordered, ordered[1:], strict=False))
        places.append(begins)
    assert places[0] == places[2] and places[1] == places[3] and not set(places[0]) & set(places[1])


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GOMP_parallel on Linux")
def test_torchs_own_openmp_runtime_is_found() -> None:
    assert import_module("quire_kernels.cpu_runtime.workers").parallel_region() is not None


@pytest.fixture
def cache_folder(monkeypatch: pytest.MonkeyPatch) -> Callable[[], bool]:
    """Return the function that finds the cache folder in a fresh process; numba's setting is restored afterwards."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    cache = import_module("quire_kernels.cpu_runtime.cache")
    monkeypatch.setattr(cache, "_folder", cache._folder.__wrapped__)

    def is_kept() -> bool:
        with cache.cache_folder("float32", "worker") as kept:
            return bool(kept)

    return is_kept


def test_machine_code_is_kept_in_the_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Callable[[], bool]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder()
    Worker(_count_worker).address(torch.float32)
    assert list((tmp_path / "quire" / "numba").rglob("*.nbc"))


def test_unwritable_cache_folder_only_costs_time(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cache_folder: Callable[[], bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "quire").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not cache_folder()
    assert "compiled kernels are not kept between starts" in caplog.text and "XDG_CACHE_HOME" in caplog.text


def test_other_sources_or_another_numba_get_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Callable[[], bool]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() and cache_folder()
    monkeypatch.setattr(numba, "__version__", "0.0.1")
    assert cache_folder()
    assert len(list((tmp_path / "quire" / "numba").iterdir())) == 2


def test_each_storage_type_has_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Callable[[], bool]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for storage in (torch.float32, torch.bfloat16):
        Worker(_count_worker).address(storage)
    indexes = list((tmp_path / "quire" / "numba").rglob("*.nbi"))
    assert {index.relative_to(tmp_path / "quire" / "numba").parts[1] for index in indexes} == {"float32", "bfloat16"}


def test_no_worker_is_a_closure() -> None:
    """Workers have no cells with compiled functions, because numba never finds such workers on disk."""
    root = Path(import_module("quire_kernels").__file__).parent
    names = [f"quire_kernels.{source.parent.name}.cpu" for source in root.glob("*/cpu.py")]
    workers = [found for name in names for found in vars(import_module(name)).values() if isinstance(found, Worker)]
    assert len(workers) > 10
    assert [worker for worker in workers if worker._function.__closure__] == []


_COMPILES = """
import logging, sys, torch
logging.basicConfig(level="INFO", stream=sys.stdout)
from quire_kernels.rms_norm.cpu import rms_norm
print("imported", flush=True)
sys.stdin.readline()
x = torch.ones(3, 16)
print(float(rms_norm(x, torch.ones(16), 1e-6, None).sum().round()))
"""


def test_simultaneous_first_starts_compile_each_worker_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _COMPILES]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    environment.pop("NUMBA_CACHE_DIR", None)

    def begin() -> "subprocess.Popen[str]":
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    compiled: list[str] = []

    def result(process: "subprocess.Popen[str]") -> str:
        out, _ = process.communicate(timeout=120)
        compiled.extend(line.rpartition(" in ")[0] for line in out.splitlines() if ":compiled " in line)
        return out.splitlines()[-1]

    with begin() as first, begin() as second:
        for process in (first, second):
            assert process.stdout is not None and process.stdout.readline() == "imported\n"
        for process in (first, second):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        assert {result(first), result(second)} == {"48.0"}
    kept = sorted((tmp_path / "quire" / "numba").rglob("*.nb*"))
    written = [file.stat().st_mtime_ns for file in kept]
    with begin() as third:
        assert result(third) == "48.0"
    assert kept and [file.stat().st_mtime_ns for file in kept] == written  # it compiled nothing
    assert compiled and len(compiled) == len(set(compiled))


_HOLDS = """
import multiprocessing, sys
from pathlib import Path
from quire_kernels.cpu_runtime.compile_lock import CompileLocks
multiprocessing.current_process().name = "rank 1"
with CompileLocks().hold(Path(sys.argv[1])):
    print("holds", flush=True)
    sys.stdin.readline()
"""


def test_process_waits_for_a_holder_until_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "worker.lock"
    command = [sys.executable, "-c", _HOLDS, str(lock)]
    waits: list[str] = []

    class KillsTheHolder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            waits.append(record.getMessage())
            holder.kill()

    logger, handler = logging.getLogger(CompileLocks.__module__), KillsTheHolder()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            with CompileLocks(first_report_seconds=0.0).hold(lock):
                assert f"process {os.getpid()}" in lock.read_text()
        finally:
            logger.removeHandler(handler)
            logger.setLevel(logging.NOTSET)
    assert waits == [f"waits for rank 1 (process {holder.pid}), which compiles the CPU kernels"]


def test_process_compiles_itself_when_its_patience_ends(tmp_path: Path) -> None:
    lock, entered = tmp_path / "worker.lock", []
    with CompileLocks().hold(lock), CompileLocks(longest_wait_seconds=0.0).hold(lock):
        entered.append(lock.read_text())
    assert entered == [f"process {os.getpid()}"]


def test_process_compiles_without_a_lock_where_none_can_be_had(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    entered = []
    for place in (tmp_path / "missing" / "worker.lock", tmp_path / "folder"):
        with CompileLocks().hold(place):
            entered.append(place)
    assert len(entered) == 2


def test_error_of_the_compilation_is_not_hidden_by_the_lock(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no space"), CompileLocks().hold(tmp_path / "worker.lock"):
        raise OSError("no space")


OPS = ["rms_norm", "store_kv", "activation", "paged_attention", "sampling"]


@pytest.mark.parametrize("op", OPS)
def test_device_without_an_implementation_is_refused_by_op_name(op: str) -> None:
    with pytest.raises(UnsupportedDeviceError, match=f"{op}: no path for xpu devices"):
        implementation(op, "xpu")
