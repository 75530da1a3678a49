"""Traces as requests with an engine fitted to them, the faults found in them, and the day-shaped trace."""

import json
from pathlib import Path

import pytest

from benchmarks.autoscaling.loads import (
    BASE,
    MEAN_BUSY,
    Load,
    busy_seconds,
    costs,
    day_shaped,
    fitted,
    jittered,
    load_of,
)
from benchmarks.autoscaling.scenarios import OUTAGE_SECONDS, FaultKind, busiest, cases, faults_of, steepest_ramp
from quire_cli.simulation.fleet import Crash, ScrapeOutage, SlowReplicas
from quire_cli.simulation.traces import Request, TraceError


def flat(seconds: int, *, prompt: int = 1000, output: int = 20) -> tuple[Request, ...]:
    return tuple(Request(float(second), prompt, output) for second in range(seconds))


@pytest.fixture
def ramp() -> Load:
    """Return a load that is quiet for 20 minutes, ten times as large for 10, and quiet for 10."""
    quiet = [Request(float(t), 500, 10) for t in range(0, 2400, 5)]
    loud = [Request(1200.0 + t / 2, 500, 10) for t in range(1200)]
    return fitted("ramp", tuple(sorted((*quiet, *loud), key=lambda request: request.time)))


def test_engine_speed_keeps_two_replicas_busy_on_average() -> None:
    load = fitted("flat", flat(900, prompt=4000))
    assert load.mean_busy == pytest.approx(MEAN_BUSY)
    assert busy_seconds(load.requests, load.engine) / load.span_seconds == pytest.approx(MEAN_BUSY)
    assert load.engine.kv_tokens >= 24 * 4020


def test_almost_empty_trace_gives_a_realistic_engine() -> None:
    load = fitted("sparse", (Request(0.0, 10, 5), Request(86_400.0, 10, 5)))
    assert load.engine.step_seconds == pytest.approx(4 * BASE.step_seconds)
    assert load.mean_busy < 0.1


def test_trace_of_one_request_is_a_load(tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,0\n")
    load = load_of(path)
    assert (load.requests, load.scored_from) == ((Request(0.0, 4808, 1),), 0.0)
    assert load.engine.kv_tokens > 4809
    assert all(faults_of(load, kind) is not None for kind in FaultKind)


def test_cached_blocks_cost_nothing_except_the_last_token() -> None:
    requests = (Request(0.0, 1024, 1, (1, 2)), Request(1.0, 1024, 1, (1, 2)), Request(2.0, 1024, 1, (1, 3)))
    first, second, third = (cost * BASE.prefill_tokens_per_second for cost in costs(requests, BASE))
    assert first - second == pytest.approx(1023) and first - third == pytest.approx(512)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "contains no requests|header", id="empty"),
        pytest.param("a,b\n1,2\n", "missing: TIMESTAMP", id="other columns"),
        pytest.param("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,2\n", "line 2", id="no time"),
        pytest.param(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,-5,2\n",
            "-5|negative|0 or more",
            id="negative",
        ),
        pytest.param('{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "nan|number|finite", id="NaN"),
        pytest.param('{"timestamp": 1}\n', "line 1", id="no lengths"),
    ],
)
def test_invalid_trace_is_refused_with_a_reason(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(TraceError, match=f"(?i){says}"):
        load_of(path)


def test_requests_may_arrive_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "mixed.jsonl"
    rows = [{"timestamp": t, "input_length": 5, "output_length": 5, "hash_ids": [t]} for t in (9000, 1000, 5000)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [request.time for request in load_of(path).requests] == [0.0, 4.0, 8.0]


def test_outage_starts_with_the_ramp_and_crash_at_the_peak(ramp: Load) -> None:
    assert steepest_ramp(ramp) == pytest.approx(1200.0, abs=20)
    assert 1200 <= busiest(ramp) <= 1800
    (outage,) = faults_of(ramp, FaultKind.SCRAPE_OUTAGE)
    assert isinstance(outage, ScrapeOutage) and outage.seconds == OUTAGE_SECONDS
    (crash,) = faults_of(ramp, FaultKind.CRASHED_POD)
    assert isinstance(crash, Crash) and crash.time >= ramp.scored_from
    (slow,) = faults_of(ramp, FaultKind.SLOW_PODS)
    assert isinstance(slow, SlowReplicas)
    assert slow.start + slow.seconds / 2 == pytest.approx((ramp.scored_from + ramp.span_seconds) / 2)


def test_every_delay_is_combined_with_every_fault(ramp: Load) -> None:
    seen = {(case.startup_delay_seconds, case.fault) for case in cases(ramp)}
    assert seen == {(delay, fault) for delay in (30.0, 120.0, 420.0) for fault in FaultKind}


def test_seed_shifts_arrivals_slightly_and_changes_nothing_else(ramp: Load) -> None:
    assert jittered(ramp, 0) == ramp.requests
    moved = jittered(ramp, 1)
    assert moved == jittered(ramp, 1) != jittered(ramp, 2)
    assert sorted((r.prompt_tokens, r.output_tokens) for r in moved) == sorted(
        (r.prompt_tokens, r.output_tokens) for r in ramp.requests
    )
    shifts = [after.time - before.time for before, after in zip(ramp.requests, moved, strict=True)]
    assert max(shifts) - min(shifts) < 20 and [r.time for r in moved] == sorted(r.time for r in moved)


def test_the_day_is_the_same_each_time_and_quiet_at_night() -> None:
    lengths = flat(10)
    day = day_shaped(lengths)
    assert day.requests == day_shaped(lengths).requests != day_shaped(lengths, seed=2).requests
    span = day.span_seconds

    def count(start: float, end: float) -> int:
        return sum(start * span <= request.time < end * span for request in day.requests)

    assert count(0.4, 0.6) > 3 * count(0.9, 1.0) + 3 * count(0.0, 0.1)
