"""Token buckets: their refill, the cost of a request, and the times in headers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.rate_limits import (
    Bucket,
    charged,
    missing,
    refilled,
    written_duration,
)


@pytest.mark.parametrize(
    ("level", "passed", "per_minute", "expected"),
    [
        (0.0, 1.0, 60, 1.0),
        (0.0, 60.0, 60, 60.0),
        (0.0, 600.0, 60, 60.0),  # at most the amount of a minute
        (-30.0, 15.0, 60, -15.0),  # a debt is paid first
        (50.0, 0.0, 20, 20.0),  # the limit was reduced
        (5.0, -9.0, 60, 5.0),
    ],
)
def test_a_bucket_fills_evenly_up_to_a_minutes_worth(
    level: float, passed: float, per_minute: int, expected: float
) -> None:
    assert refilled(Bucket(level, 100.0), per_minute, 100.0 + passed).level == pytest.approx(expected)


@pytest.mark.parametrize(
    ("level", "cost", "lack"), [(10.0, 4, 0.0), (10.0, 12, 2.0), (-5.0, 1, 6.0), (60.0, 500, 0.0), (59.0, 500, 1.0)]
)
def test_a_cost_above_the_capacity_needs_a_full_bucket(level: float, cost: float, lack: float) -> None:
    assert missing(Bucket(level, 0.0), cost, 60) == lack


@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), max_size=60), st.integers(1, 120))
def test_token_bucket_never_exceeds_its_refill_rate(events: list[tuple[float, int]], per_minute: int) -> None:
    bucket, now, used = Bucket(float(per_minute), 0.0), 0.0, 0
    for passed, cost in events:
        now += passed
        bucket = refilled(bucket, per_minute, now)
        if missing(bucket, cost, per_minute) == 0.0:
            bucket = charged(bucket, cost)
            used += cost
        assert used <= per_minute * (1 + now / 60) + 40 + 1e-6  # one cost beyond it: the debt


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0ms"), (0.25, "250ms"), (7.5, "7.5s"), (12.0, "12s"), (90.0, "1m30s"), (120, "2m0s")]
)
def test_reset_times_have_the_openai_format(seconds: float, text: str) -> None:
    assert written_duration(seconds) == text
