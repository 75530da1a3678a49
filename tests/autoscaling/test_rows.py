"""The score of a policy in a case, the winner of a row, the objective of the tuner, and the commands."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from benchmarks.autoscaling.loads import Load, fitted
from benchmarks.autoscaling.matrix import Row, rows_of, simulations
from benchmarks.autoscaling.policies.static import ReactiveBound, needed_so_far
from benchmarks.autoscaling.registry import POLICIES, ConfigurationError, tuned
from benchmarks.autoscaling.scenarios import TARGETS, Case, FaultKind
from benchmarks.autoscaling.scoring import Score, Statics, reactive_bound, score_policy
from benchmarks.autoscaling.tables import markdown, verdict
from benchmarks.autoscaling.tune import cost, drawn, search
from quire_cli.simulation.traces import Request
from quire_operator.domain.autoscaling.observation import Observation
from quire_operator.domain.autoscaling.tuning import Tuning

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


def row(case: Case, ours: Score, *, infeasible: bool = False, target: float = 0.95, **peers: Score) -> Row:
    bad = score(0.5, 9.0)
    scores = {"hpa": bad, "kpa": bad, "keda": bad, "llmd": bad, "oracle": score(1.0, 1.0)} | peers | {"quire": ours}
    return Row(case=case, target=target, infeasible=infeasible, scores=scores, oracle_replicas=2)


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
    assert verdict(there).startswith("won" if won else "lost")


def test_row_has_the_documented_fields(case: Case) -> None:
    there = row(case, score(0.96, 8.0), infeasible=True).as_json()
    assert list(there) == ["trace", "startup_delay_seconds", "fault", "target", "infeasible", "policies"]
    assert there["infeasible"] is True and there["fault"] == "none"
    assert set(there["policies"]) == {"quire", "hpa", "kpa", "keda", "llmd", "oracle"}
    for figures in there["policies"].values():
        assert list(figures) == ["attainment", "replica_hours", "changes_per_hour", "worst_queue"]
    assert "infeasible" in markdown([row(case, score(0.9, 99.0), infeasible=True)])


def test_hindsight_is_the_smallest_fleet_that_meets_the_target(case: Case) -> None:
    statics = Statics((0,))
    best = statics.oracle(case, 0.95)
    assert best.score.meets(0.95)
    assert best.replicas == 1 or not statics.score(case, best.replicas - 1).meets(0.95)
    assert best.score.replica_hours == pytest.approx(
        best.replicas * (case.load.span_seconds - case.load.scored_from) / 3600
    )


def test_every_policy_runs_with_its_defaults_and_choices(case: Case) -> None:
    for policy in POLICIES.values():
        for parameters in (policy.defaults, tuned(policy)):
            seen = score_policy(case, (0,), lambda policy=policy, p=parameters: policy.scaler(p, case.load, 0.95))  # type: ignore[misc]
            assert 0 <= seen.attainment <= 1 and seen.replica_hours > 0


def test_need_so_far_is_the_most_that_any_stretch_kept_busy() -> None:
    assert needed_so_far([4.0, 0.0, 0.0]) == pytest.approx([4 / 3] * 3)
    assert needed_so_far([1.0] * 8)[-1] == pytest.approx(8 / 10)
    assert needed_so_far([0.0, 6.0, 6.0, 0.0]) == pytest.approx([0.0, 2.0, 3.0, 3.0])


def test_bound_never_lowers_and_lags_ramps_faster_than_a_start(load: Load) -> None:
    bound = ReactiveBound([Request(0.0, 1, 1), Request(9.0, 1, 1)], [30.0, 0.0], static=16, maximum=48)
    asked = [bound.decide(Observation(replicas=(), target=now), now).replicas for now in (1, 2, 9)]
    assert asked == [21, 21, 21]
    quiet = [Request(float(t), 100, 4) for t in range(0, 600, 5)]
    sudden = fitted("sudden", (*quiet, *(Request(600 + t / 10, 4000, 4) for t in range(600))))
    slow = Case(load=sudden, startup_delay_seconds=420.0, fault=FaultKind.NONE)
    assert not reactive_bound(slow, (0,), static=20).meets(0.95)
    quick = Case(load=load, startup_delay_seconds=0.0, fault=FaultKind.NONE)
    assert reactive_bound(quick, (0,), static=Statics((0,)).oracle(quick, 0.95).replicas).meets(0.95)


def test_missed_target_costs_more_than_any_saving() -> None:
    met, narrow, wide = (
        cost(score(0.95, 2.0), 0.95, 1.0),
        cost(score(0.94, 1.0), 0.95, 1.0),
        cost(score(0.8, 1.0), 0.95, 1.0),
    )
    assert met == pytest.approx(2.0) and 2.0 < narrow < wide
    assert wide == pytest.approx(1 + 1 + 2)


def test_the_search_begins_with_the_defaults_and_keeps_the_best() -> None:
    policy = POLICIES["kpa"]
    assert drawn(policy, 0, 8, policy.defaults) == policy.defaults
    assert drawn(policy, 2, 8, policy.defaults) == drawn(policy, 2, 8, policy.defaults)
    near = drawn(policy, 7, 8, policy.defaults)
    assert 0 < sum(near[name] != policy.defaults[name] for name in policy.space) < len(policy.space)

    class Judge:
        def cost(self, policy: object, parameters: dict[str, float], *, worth: float) -> float:
            return parameters["target"]

    best, costs = search(policy, Judge(), 10, lambda line: None)  # type: ignore[arg-type]
    assert best["target"] == min(costs) < costs[0] and len(costs) == 10


def test_a_broken_configuration_is_named(tmp_path: Path, load: Load) -> None:
    policy = POLICIES["hpa"]
    assert tuned(policy, tmp_path) == policy.defaults
    (tmp_path / "hpa.json").write_text("[]")
    with pytest.raises(ConfigurationError, match=r"hpa\.json"):
        tuned(policy, tmp_path)
    with pytest.raises(ConfigurationError, match="kv_usage"):
        policy.scaler({name: value for name, value in policy.defaults.items() if name != "kv_usage"}, load, 0.95)
    with pytest.raises(ConfigurationError, match="requests_per_pod should be a number"):
        policy.scaler({**policy.defaults, "requests_per_pod": "many"}, load, 0.95)


def test_chosen_constants_are_in_the_search_space() -> None:
    for policy in POLICIES.values():
        assert {name for name, value in tuned(policy).items() if value not in policy.space[name]} == set()


def test_compared_constants_equal_those_of_the_product() -> None:
    chosen, product = tuned(POLICIES["quire"]), asdict(Tuning())
    assert {name: chosen[name] for name in product} == product


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.autoscaling.run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_the_command_writes_rows_of_any_trace(tmp_path: Path) -> None:
    trace = tmp_path / "tiny.jsonl"
    rows = [{"timestamp": 500 * t, "input_length": 600, "output_length": 5, "hash_ids": [0, t]} for t in range(60)]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out, plot = tmp_path / "rows.json", tmp_path / "rows.png"
    timeline = tmp_path / "time.svg"
    done = run(
        *("--trace", str(trace), "--fault", "none", "--json", str(out)),
        *("--plot", str(plot), "--timeline", str(timeline)),
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    assert list(written) == ["rows"] and len(written["rows"]) == 3 * 2
    assert {row["trace"] for row in written["rows"]} == {"tiny"}
    assert "rows won" in done.stdout and "3 seeds of 3" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG") and (tmp_path / "time-tiny.svg").exists()


@pytest.mark.parametrize("name", ["missing.csv", "odd.csv"])
def test_command_reports_an_invalid_trace(tmp_path: Path, name: str) -> None:
    (tmp_path / "odd.csv").write_text("a,b\n1,2\n")
    done = run("--trace", str(tmp_path / name))
    assert done.returncode == 1 and name in done.stderr and "Traceback" not in done.stderr


def test_number_of_processes_does_not_change_results(case: Case) -> None:
    chosen = {name: policy.defaults for name, policy in POLICIES.items()}
    crashed = replace(case, fault=FaultKind.CRASHED_POD)
    advanced: list[int] = []
    alone, together = (
        [row.as_json() for row in rows_of([case, crashed], chosen, (0,), advance=advanced.append, jobs=jobs)]
        for jobs in (1, 2)
    )
    assert alone == together and len(alone) == 2 * len(TARGETS)
    assert sum(advanced) == 2 * simulations([case, crashed], 1)


def test_scores_are_means_except_the_worst_queue(case: Case) -> None:
    policy = POLICIES["hpa"]
    one, two = (score_policy(case, (seed,), lambda: policy.scaler(policy.defaults, case.load, 0.95)) for seed in (0, 1))
    both = score_policy(case, (0, 1), lambda: policy.scaler(policy.defaults, case.load, 0.95))
    assert both.attainment == pytest.approx((one.attainment + two.attainment) / 2)
    assert both.worst_queue == max(one.worst_queue, two.worst_queue)
    assert replace(both, attainment=0.4).late == pytest.approx(0.6)
