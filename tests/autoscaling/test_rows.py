"""The rows of the comparison: who wins, hindsight static, faults and engines that follow from a trace, the command."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.autoscaling.cases import (
    OUTAGE_SECONDS,
    Case,
    FaultKind,
    Load,
    busiest,
    faults_of,
    fitted,
    steepest_ramp,
)
from benchmarks.autoscaling.run import Row, Score, Statics
from quire_cli.simulation.fleet import Crash, ScrapeOutage, SlowReplicas
from quire_cli.simulation.traces import Request

ROOT = Path(__file__).resolve().parents[2]


def score(attainment: float, hours: float) -> Score:
    return Score(attainment=attainment, replica_hours=hours, changes_per_hour=1.0, worst_queue=3)


@pytest.fixture(scope="module")
def load() -> Load:
    """Return two minutes of requests, with more of them in the middle."""
    times = [t / 2 for t in range(120)] + [60 + t / 4 for t in range(120)] + [90 + t / 2 for t in range(60)]
    return fitted("small", tuple(Request(time, 400, 8) for time in sorted(times)))


@pytest.fixture
def case(load: Load) -> Case:
    return Case(load=load, startup_delay_seconds=30.0, fault=FaultKind.NONE)


def row(case: Case, ours: Score, **peers: Score) -> Row:
    scores = dict.fromkeys(("hpa", "kpa", "keda", "llmd"), score(0.5, 9.0)) | {"oracle": score(1.0, 1.0)}
    return Row(case=case, target=0.95, infeasible=False, scores=scores | peers | {"quire": ours})


@pytest.mark.parametrize(
    ("ours", "peers", "won"),
    [
        pytest.param((0.96, 9.0), {"hpa": (0.95, 10.0)}, True, id="0.9 of the cheapest that meets it"),
        pytest.param((0.96, 9.1), {"hpa": (0.95, 10.0)}, False, id="0.91 is too much"),
        pytest.param((0.94, 1.0), {"hpa": (0.95, 10.0)}, False, id="missed, and a peer meets it"),
        pytest.param((0.96, 9.0), {"hpa": (0.95, 11.0), "kpa": (0.96, 9.5)}, False, id="the cheaper peer counts"),
        pytest.param((0.96, 9.0), {"hpa": (0.95, 10.0), "kpa": (0.94, 1.0)}, True, id="who misses is no rival"),
        pytest.param((0.80, 8.0), {"hpa": (0.60, 8.0)}, True, id="none meets it: half as late at no more hours"),
        pytest.param((0.79, 8.0), {"hpa": (0.60, 8.0)}, False, id="none meets it: not half"),
        pytest.param((0.96, 8.1), {"hpa": (0.60, 8.0)}, False, id="none meets it: more hours"),
    ],
)
def test_row_winner_follows_the_rule(
    case: Case, ours: tuple[float, float], peers: dict[str, tuple[float, float]], won: bool
) -> None:
    there = row(case, score(*ours), **{name: score(*figures) for name, figures in peers.items()})
    assert there.is_won is won
    assert there.verdict.startswith("won" if won else "lost")


def test_hindsight_is_the_smallest_fleet_that_meets_the_target(case: Case) -> None:
    statics = Statics((0,))
    best = statics.oracle(case, 0.95)
    assert best.score.meets(0.95)
    assert best.replicas == 1 or not statics.score(case, best.replicas - 1).meets(0.95)
    assert best.score.replica_hours == pytest.approx(
        best.replicas * (case.load.span_seconds - case.load.scored_from) / 3600
    )


def test_outage_starts_with_the_ramp_and_crash_at_the_peak() -> None:
    quiet = [Request(float(t), 500, 10) for t in range(0, 2400, 5)]
    loud = [Request(1200.0 + t / 2, 500, 10) for t in range(1200)]
    ramp = fitted("ramp", tuple(sorted((*quiet, *loud), key=lambda request: request.time)))
    assert steepest_ramp(ramp) == pytest.approx(1200.0, abs=20)
    assert 1200 <= busiest(ramp) <= 1800
    (outage,) = faults_of(ramp, FaultKind.SCRAPE_OUTAGE)
    assert isinstance(outage, ScrapeOutage) and outage.seconds == OUTAGE_SECONDS
    (crash,) = faults_of(ramp, FaultKind.CRASHED_POD)
    assert isinstance(crash, Crash) and crash.time >= ramp.scored_from
    (slow,) = faults_of(ramp, FaultKind.SLOW_PODS)
    assert isinstance(slow, SlowReplicas)
    assert slow.start + slow.seconds / 2 == pytest.approx((ramp.scored_from + ramp.span_seconds) / 2)


def test_the_command_writes_rows_of_any_trace(tmp_path: Path) -> None:
    trace = tmp_path / "tiny.jsonl"
    rows = [{"timestamp": 500 * t, "input_length": 600, "output_length": 5, "hash_ids": [0, t]} for t in range(60)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.autoscaling.run", "--trace", str(trace), "--fault", "none"]
    done = subprocess.run([*command, "--json", str(out)], capture_output=True, text=True, timeout=200, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())["rows"]
    assert len(written) == 3 * 2 and {row["trace"] for row in written} == {"tiny"}
    assert set(written[0]["policies"]) == {"quire", "hpa", "kpa", "keda", "llmd", "oracle"}
    assert "rows won" in done.stdout
