"""What benchmarks/kernels holds to be right or wrong, and what becomes of a case that fails. No GPU, no times."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="torch's CPU build comes without triton")

import cases_attention
from cases_attention import Attention, decode, prompts
from kernel_cases import BOUNDS, Case, Prepared, compare
from measuring import Row, measure
from quire_kernels.errors import ArgumentError

CPU = torch.device("cpu")


def prepared(expected: Tensor, **options: object) -> Prepared:
    return Prepared(call=lambda: None, expected=lambda: expected, **options)  # type: ignore[arg-type]


def test_one_wrong_row_among_many_is_wrong() -> None:
    expected = torch.randn(1000, 64, dtype=torch.float16)
    found = expected.clone()
    assert compare(prepared(expected), found, expected).holds
    found[717] *= 1.01
    verdict = compare(prepared(expected), found, expected)
    assert not verdict.holds and verdict.error == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("dtype", BOUNDS)
def test_rounding_is_right_in_every_dtype(dtype: torch.dtype) -> None:
    exact = torch.randn(100, 128, dtype=torch.float64)
    assert compare(prepared(exact), exact.to(dtype), exact.to(torch.float32).to(dtype)).holds


@pytest.mark.parametrize(
    "found",
    [torch.full((2, 4), torch.nan), torch.zeros(2, 4), torch.ones(2, 5), torch.full((2, 4), torch.inf)],
    ids=["NaN", "zeros", "another shape", "infinite"],
)
def test_nothing_like_the_expected_is_wrong(found: Tensor) -> None:
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


def test_a_wrong_case_says_by_how_much_and_is_not_timed() -> None:
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


# --- what attention has to do ---


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


def test_a_filled_cache_gives_every_sequence_blocks_of_its_own() -> None:
    shape = Attention(query_lens=[1, 1], context_lens=[33, 5], kv_heads=2, head_dim=16)
    cache, tables = cases_attention.filled_cache(shape, CPU, torch.float32)
    used = [*tables[0, :3].tolist(), *tables[1, :1].tolist()]
    assert sorted(used) == [0, 1, 2, 3] and cache.num_blocks == 4
    assert cache.keys.abs().min() > 0.0
