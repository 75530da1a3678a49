"""Percentiles, rates and goodput follow the field's definitions."""

import pytest

from quire_cli.bench.summary import MeasuredRequest, Objective, percentile, summarise


def outcome(
    sent: float, first: float | None, end: float, tokens: int, *, asked: int | None = None, error: str | None = None
) -> MeasuredRequest:
    return MeasuredRequest(
        sent_seconds=sent,
        first_token_seconds=first,
        end_seconds=end,
        chunk_gaps_seconds=(0.1,) * max(0, tokens - 1),
        prompt_tokens=10,
        output_tokens=tokens,
        requested_tokens=tokens if asked is None else asked,
        finish_reason="length",
        status=200,
        error=error,
    )


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([1.0], 99, 1.0), ([1.0, 2.0], 50, 1.5), ([0.0, 10.0, 20.0], 90, 18.0), ([1.0, 2.0, 3.0], 100, 3.0)],
)
def test_percentiles_interpolate(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == pytest.approx(expected)


def test_rates_count_from_the_first_request_to_the_last_answer() -> None:
    summary = summarise([outcome(1, 2, 4, 5), outcome(2, 3, 6, 11), outcome(2, None, 3, 0, error="boom")], Objective())
    assert (summary.requests, summary.succeeded, summary.errors) == (3, 2, {"boom": 1})
    assert summary.duration_seconds == 5
    assert summary.output_tokens_per_second == pytest.approx(16 / 5)
    assert summary.total_tokens_per_second == pytest.approx(36 / 5)
    assert summary.goodput_requests_per_second is None
    assert summary.tpot_seconds is not None
    assert summary.tpot_seconds.mean == pytest.approx((2 / 4 + 3 / 10) / 2)


def test_goodput_counts_requests_within_every_objective() -> None:
    fast, late, slow = outcome(0, 0.5, 1, 3), outcome(0, 2, 2.5, 3), outcome(0, 0.5, 10, 3)
    failed = outcome(0, None, 0.1, 0, error="x")
    summary = summarise([fast, late, slow, failed], Objective(ttft_seconds=1, e2e_seconds=5))
    assert summary.goodput_requests_per_second == pytest.approx(1 / 10)


def test_short_answers_are_counted() -> None:
    assert summarise([outcome(0, 1, 2, 3, asked=5), outcome(0, 1, 2, 5)], Objective()).short == 1


def test_summary_of_no_requests_is_empty() -> None:
    summary = summarise([], Objective())
    assert (summary.requests, summary.ttft_seconds, summary.requests_per_second) == (0, None, 0.0)
