"""The verdicts of benchmarks/kernels, and the handling of a failed case. It needs no GPU and measures no times."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

from benchmarks import report
from benchmarks.kernels import cases_attention, run, tune
from benchmarks.kernels.cases_attention import Attention, decode, prompts
from benchmarks.kernels.gpu_timing import Card, Timing
from benchmarks.kernels.kernel_cases import BOUNDS, Case, Prepared, compare
from benchmarks.kernels.measuring import Row, measure
from quire_kernels.errors import ArgumentError

CPU = torch.device("cpu")


def prepared(expected: Tensor, **options: object) -> Prepared:
    return Prepared(call=lambda: None, expected=lambda: expected, **options)  # type: ignore[arg-type]


def test_single_wrong_row_is_detected() -> None:
    expected = torch.randn(1000, 64, dtype=torch.float16)
    found = expected.clone()
    assert compare(prepared(expected), found, expected).holds
    found[717] *= 1.01
    verdict = compare(prepared(expected), found, expected)
    assert not verdict.holds and verdict.error == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rounding_errors_are_accepted_in_every_dtype(dtype: torch.dtype) -> None:
    exact = torch.randn(100, 128, dtype=torch.float64)
    assert compare(prepared(exact), exact.to(dtype), exact.to(torch.float32).to(dtype)).holds


@pytest.mark.parametrize(
    "found",
    [torch.full((2, 4), torch.nan), torch.zeros(2, 4), torch.ones(2, 5), torch.full((2, 4), torch.inf)],
    ids=["NaN", "zeros", "another shape", "infinite"],
)
def test_unrelated_result_is_wrong(found: Tensor) -> None:
    expected = torch.ones(2, 4)
    assert not compare(prepared(expected), found, expected).holds


def test_tokens_are_equal_or_wrong() -> None:
    expected = torch.arange(10)
    assert compare(prepared(expected, exact=True), expected.clone(), expected).holds
    assert compare(prepared(expected, exact=True), expected.flip(0), expected).error == 1.0


def test_every_part_of_a_result_is_compared() -> None:
    parts = [torch.ones(3, 4), torch.ones(3, 4)]
    assert compare(prepared(parts[0]), parts, parts).holds
    assert not compare(prepared(parts[0]), [parts[0], parts[1] * 2], parts).holds


def outcome(prepare: Callable[[torch.device, torch.dtype], Prepared]) -> Row:
    return measure(Case(op="op", name="case", prepare=prepare), CPU, torch.float32, None, None)


def test_a_right_case_is_a_row_without_times() -> None:
    row = outcome(lambda device, dtype: Prepared(call=lambda: torch.ones(2, 2), expected=lambda: torch.ones(2, 2)))
    assert (row.failed, row.wrong, row.error) == (None, False, 0.0)


def test_wrong_case_reports_its_error_and_is_not_timed() -> None:
    row = outcome(lambda device, dtype: Prepared(call=lambda: torch.zeros(2, 2), expected=lambda: torch.ones(2, 2)))
    assert row.wrong and row.failed == "wrong: error 1, at most 2e-05 is allowed" and row.seconds is None


@pytest.mark.parametrize(
    ("error", "wrong"),
    [
        (ArgumentError("op: x is wrong"), False),
        (torch.OutOfMemoryError("too much"), False),
        (RuntimeError("\n a driver's words\nand more"), True),
    ],
)
def test_a_refused_case_is_a_row_and_only_a_crash_is_wrong(error: Exception, wrong: bool) -> None:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        raise error

    row = outcome(prepare)
    assert row.wrong is wrong and row.failed == f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def test_tuner_leaves_out_a_case_whose_error_has_no_message(capsys: pytest.CaptureFixture[str]) -> None:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        raise AssertionError

    tuner: Any = SimpleNamespace(device=CPU, dtype=torch.float32)
    tune.tune_op([Case(op="op", name="case", prepare=prepare)], tuner)
    assert capsys.readouterr().err == "op: case: left out: AssertionError: \n"


# --- the work of attention ---


@pytest.mark.parametrize(
    ("shape", "pairs", "tokens"),
    [
        (decode(3, 100), 300, 300),
        (prompts(1, 4), 1 + 2 + 3 + 4, 4),
        (prompts(1, 2, 10), 9 + 10, 10),
        (decode(2, 100, window=30), 60, 60),
        (prompts(1, 4, window=2), 1 + 2 + 2 + 2, 4),
        (prompts(1, 3, 10, window=4), 12, 6),
        (Attention(query_lens=[1, 2], context_lens=[5, 2]), 5 + 1 + 2, 7),
    ],
)
def test_pairs_and_tokens_of_attention_are_counted(shape: Attention, pairs: int, tokens: int) -> None:
    assert shape.visible_pairs() == pairs and shape.tokens_read() == tokens


def test_filled_cache_gives_every_sequence_separate_blocks() -> None:
    shape = Attention(query_lens=[1, 1], context_lens=[33, 5], kv_heads=2, head_dim=16)
    cache, tables = cases_attention.filled_cache(shape, CPU, torch.float32)
    used = [*tables[0, :3].tolist(), *tables[1, :1].tolist()]
    assert sorted(used) == [0, 1, 2, 3] and cache.num_blocks == 4
    assert cache.keys.abs().min() > 0.0


# --- rows with times, from a timer that only counts ---


class CountingTimer:
    """A timer by which our kernel takes 1 ms, and each later one 2 ms more."""

    def __init__(self) -> None:
        self.timed = 0

    def time(self, call: Callable[[], object]) -> Timing:
        call()
        self.timed += 1
        return Timing(median=1e-3 * (2 * self.timed - 1), fastest=9e-4, calls=10)


CARD = Card(read_bytes_per_second=4e12, copy_bytes_per_second=3e12, gemm_flops={"float32": 5e13})


def timed_row(**peers: Callable[[], object]) -> Row:
    def prepare(device: torch.device, dtype: torch.dtype) -> Prepared:
        return Prepared(
            call=lambda: torch.ones(2, 2), expected=lambda: torch.ones(2, 2), bytes=2 * 10**9, flops=10**9, peers=peers
        )

    case = Case(op="op", name="case", prepare=prepare)
    return measure(case, CPU, torch.float32, CountingTimer(), CARD)  # type: ignore[arg-type]


def refuses() -> Tensor:
    raise ValueError("no such head dim")


def test_times_are_compared_with_the_measured_peak() -> None:
    row = timed_row()
    assert (row.seconds, row.calls, row.bytes_per_second) == (1e-3, 10, 2e12)
    assert row.bandwidth_share == pytest.approx(0.5) and row.gemm_share == pytest.approx(0.02)


def test_peers_are_compared_and_timed_and_failures_stay_local() -> None:
    row = timed_row(slower=lambda: torch.ones(2, 2), wrong=lambda: torch.zeros(2, 2), refusing=refuses)
    assert row.peers["slower"].ratio == pytest.approx(3.0) and row.peers["slower"].error == 0.0
    assert row.peers["wrong"].seconds is None and (row.peers["wrong"].failed or "").startswith("wrong: error 1")
    assert row.peers["refusing"].failed == "ValueError: no such head dim"
    assert row.failed is None and row.seconds is not None


def test_table_names_reached_refusing_and_missing_parts(capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"device": "a GPU", "torch": "2", "triton": "3", "python": "3.12", "peers": {}}
    failed = Row(op="op", case="other", failed="ArgumentError: op: x is wrong")
    run.show([timed_row(refusing=refuses, slower=lambda: torch.ones(2, 2)), failed], machine, CARD, ["op: third"])
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "2,000 GB/s",
        "50% of bandwidth",
        "slower 3.00x",
        "refusing: ValueError: no such head dim",
        "op: other: ArgumentError: op: x is wrong",
        "not measured, the time was up: op: third",
        "read 4,000 GB/s",
    ):
        assert words in said, said


def test_results_are_written_completely_and_plotted(tmp_path: Path) -> None:
    report.write_json(tmp_path / "deep" / "rows.json", {"rows": [1]})
    report.write_json(tmp_path / "deep" / "rows.json", {"rows": [1, 2]})
    assert json.loads((tmp_path / "deep" / "rows.json").read_text()) == {"rows": [1, 2]}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows.json"]
    run.draw(tmp_path / "rows.svg", [timed_row()], "a GPU")
    assert "<svg" in (tmp_path / "rows.svg").read_text()


def test_tables_are_readable_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "Console", None)
    report.show_table("Title", ["case", "µs"], [["a long name", "1.0"], ["b", "10.0"]], ["a note"])
    assert capsys.readouterr().out == "\nTitle\ncase           µs\na long name   1.0\nb            10.0\na note\n"
