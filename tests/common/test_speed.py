"""The values that the routing policy learns from counters."""

import pytest

from quire_common.routing import PrefillRate, Rate


def test_prefill_rate_ignores_seconds_without_prompts():
    rate = PrefillRate()
    assert rate.update(0, 0.0) is None
    assert rate.update(3000, 1.0) == 3000
    assert rate.update(3000, 9.0) == 3000, "seconds that only decode do not count"
    assert rate.update(3100, 9.9) == 3000, "nor does what may be part of a step"
    assert 1000 < rate.update(4000, 10.8) < 3000
    assert rate.update(0, 0.0) == rate.update(0, 0.0), "a new engine of the same name counts as equally fast"
    for reading in range(1, 60):
        learnt = rate.update(1000 * reading, 1.0 * reading)
    assert learnt == pytest.approx(1000, rel=0.05)


def test_rate_spans_ten_seconds_and_restarts_with_the_engine():
    rate = Rate()
    assert rate.update(10, now=0.0) is None
    assert rate.update(10, now=1.0) is None
    assert rate.update(14, now=2.0) == 2.0
    assert rate.update(104, now=20.0) == pytest.approx(90 / 18)
    assert rate.update(3, now=21.0) is None
    assert rate.update(5, now=22.0) == 2.0
