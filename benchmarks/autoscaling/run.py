#!/usr/bin/env python3
"""Compare every policy on a trace: start-up delays of 30, 120 and 420 s, with and without faults, two targets.

    python -m benchmarks.autoscaling.run --trace azure_llm_2023_code.csv --json rows.json

A trace is a CSV of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) or JSON lines of Mooncake's
(timestamp in ms, input_length, output_length, hash_ids). ``--trace day`` is the day-shaped one, which has the lengths
of the committed slice, or of the first trace given. docs/autoscaling.md describes the comparison.

A row is won by the goal's rule: if others meet the target, our policy meets it too with no more than ``HOURS`` of the
replica-hours of the cheapest of them; otherwise it halves the late share of the one with the fewest late answers
without more hours than that one.
"""

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.autoscaling.cases import (
    DAY,
    MAX_REPLICAS,
    MIN_REPLICAS,
    SEEDS,
    STARTUP_DELAYS,
    TARGETS,
    Case,
    FaultKind,
    Load,
    cases,
    costs,
    day_shaped,
    load_of,
)
from benchmarks.autoscaling.policies import (
    EngineLimits,
    HpaConfig,
    HpaScaler,
    KedaConfig,
    KedaScaler,
    KpaConfig,
    KpaScaler,
    LlmdConfig,
    LlmdScaler,
    Query,
    ReactiveBound,
    Rules,
    StaticScaler,
    Step,
    Unit,
    chart_rules,
)
from quire_cli.simulation.fleet import QuireScaler, Scaler, simulate
from quire_cli.simulation.results import SimulatedRun
from quire_cli.simulation.traces import TraceError
from quire_operator.api.scaling import Autoscaling, AutoscalingMode, LatencyTarget, ScalingTargets
from quire_operator.api.scaling_limits import ScaleDown, ScaleUp
from quire_operator.autoscaling.decision_context import Policy
from quire_operator.autoscaling.demand import Tuning

SLICE = report.ROOT / "benchmarks" / "traces" / "azure_llm_2023_code_slice.csv"
PEERS = ("hpa", "kpa", "keda", "llmd")
ORACLE = "oracle"
COLUMNS = ("quire", *PEERS, ORACLE)
HOURS, LATE = 0.9, 0.5
_EPSILON = 1e-9
_MOST_STATIC = 64
_BOUNDS = {"minimum": MIN_REPLICAS, "maximum": MAX_REPLICAS}


# --- the configurations: the best of 20 random trials for each policy (docs/autoscaling.md) ---


def _rules(window: float, *steps: tuple[Unit, float, float], tolerance: float) -> Rules:
    policies = tuple(Step(unit=unit, value=value, period_seconds=period) for unit, value, period in steps)
    return Rules(window_seconds=window, policies=policies, tolerance=tolerance)


def hpa(load: Load, target: float) -> Scaler:
    config = HpaConfig(
        requests_per_pod=3.0,
        up=_rules(0.0, (Unit.PERCENT, 200, 15.0), (Unit.PODS, 4, 15.0), tolerance=0.1),
        down=_rules(1200.0, (Unit.PERCENT, 10, 15.0), tolerance=0.1),
    )
    return HpaScaler(config, **_BOUNDS)


def keda(load: Load, target: float) -> Scaler:
    # A share of one replica's capacity, as a user sets it after measuring the engine.
    config = KedaConfig(
        query=Query.TOKEN_RATE,
        threshold=0.3 * load.engine.prefill_tokens_per_second,
        ignore_null_values=False,
        fallback_replicas=12,
        up=_rules(30.0, (Unit.PERCENT, 100, 15.0), (Unit.PODS, 8, 15.0), tolerance=0.02),
        down=_rules(1800.0, (Unit.PERCENT, 50, 120.0), tolerance=0.02),
    )
    return KedaScaler(config, **_BOUNDS)


def kpa(load: Load, target: float) -> Scaler:
    config = KpaConfig(
        target=2.0,
        panic_window_share=0.5,
        panic_threshold=1.5,
        max_scale_up_rate=2.0,
        max_scale_down_rate=1.5,
        scale_down_delay_seconds=1200.0,
    )
    return KpaScaler(config, **_BOUNDS)


def llmd(load: Load, target: float) -> Scaler:
    config = LlmdConfig(
        kv_cache_threshold=0.4,
        queue_length_threshold=1.0,
        scale_down_boundary=0.25,
        up=chart_rules(30.0),
        down=chart_rules(900.0),
    )
    limits = EngineLimits(max_batched_tokens=load.engine.max_batched_tokens, max_sequences=load.engine.max_sequences)
    return LlmdScaler(config, limits=limits, **_BOUNDS)


def quire(load: Load, target: float) -> Scaler:
    """Return the product's policy with its constants, ``metricsSource: Pods``, and the target as percentile."""
    rules = Autoscaling(
        mode=AutoscalingMode.ENFORCE,
        min_replicas=MIN_REPLICAS,
        max_replicas=MAX_REPLICAS,
        metrics_source=None,
        targets=ScalingTargets(
            queue_depth=None,
            kv_usage_percent=None,
            first_token_wait=LatencyTarget(percentile=round(100 * target), threshold_seconds=2.0),
        ),
        scale_up=ScaleUp.steps(window_seconds=0.0, max_percent=100, max_step=4, period_seconds=15.0),
        scale_down=ScaleDown.steps(window_seconds=450.0, max_step=2, period_seconds=60.0),
    )
    return QuireScaler(Policy(autoscaling=rules, max_sequences=load.engine.max_sequences, tuning=Tuning()))


POLICIES: Mapping[str, Callable[[Load, float], Scaler]] = {
    "quire": quire,
    "hpa": hpa,
    "kpa": kpa,
    "keda": keda,
    "llmd": llmd,
}


# --- scores ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Means over the seeds; the worst queue is the maximum."""

    attainment: float
    replica_hours: float
    changes_per_hour: float
    worst_queue: int

    @property
    def late(self) -> float:
        return 1.0 - self.attainment

    def meets(self, target: float) -> bool:
        return self.attainment >= target


def score_of(runs: Sequence[SimulatedRun]) -> Score:
    def mean(value: Callable[[SimulatedRun], float]) -> float:
        return sum(map(value, runs)) / len(runs)

    return Score(
        attainment=mean(lambda run: run.attainment()),
        replica_hours=mean(lambda run: run.replica_hours),
        changes_per_hour=mean(lambda run: run.changes_per_hour),
        worst_queue=max(run.worst_queue for run in runs),
    )


def score_policy(case: Case, seeds: Sequence[int], make: Callable[[Load, float], Scaler], target: float) -> Score:
    return score_of([simulate(case.requests(s), case.scenario(s), make(case.load, target)) for s in seeds])


@dataclass(frozen=True, slots=True, kw_only=True)
class Oracle:
    """Hindsight static: the fewest replicas that meet the target, or the maximum that was tried."""

    replicas: int
    score: Score


class Statics:
    """The scores of fixed numbers of replicas, each tried once.

    Metrics, and start-up without a crash, do not affect them.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self._seeds = seeds
        self._score = cache(self._simulated)

    def score(self, case: Case, replicas: int) -> Score:
        return self._score(self.alike(case), replicas)

    def oracle(self, case: Case, target: float) -> Oracle:
        """Search by bisection, because more replicas are hardly ever slower."""
        low, high = 0, 1
        while high < _MOST_STATIC and not self.score(case, high).meets(target):
            low, high = high, min(_MOST_STATIC, high * 2)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.score(case, middle).meets(target) else (middle, high)
        return Oracle(replicas=high, score=self.score(case, high))

    @staticmethod
    def alike(case: Case) -> Case:
        """Return the case that represents all cases that are equal for a fixed number of replicas."""
        fault = FaultKind.NONE if case.fault is FaultKind.SCRAPE_OUTAGE else case.fault
        delay = case.startup_delay_seconds if fault is FaultKind.CRASHED_POD else 0.0
        return Case(load=case.load, startup_delay_seconds=delay, fault=fault)

    def _simulated(self, case: Case, replicas: int) -> Score:
        runs: list[SimulatedRun] = []
        for seed in self._seeds:
            runs.append(simulate(case.requests(seed), case.static(replicas, seed), StaticScaler(replicas)))
        return score_of(runs)


def reactive_bound(case: Case, seeds: Sequence[int], *, static: int) -> Score:
    runs = []
    for seed in seeds:
        requests = case.requests(seed)
        unknown = [replace(request, prefix_blocks=()) for request in requests]
        scaler = ReactiveBound(requests, costs(unknown, case.load.engine), static=static, maximum=MAX_REPLICAS)
        runs.append(simulate(requests, case.scenario(seed), scaler))
    return score_of(runs)


# --- rows ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case under one target."""

    case: Case
    target: float
    infeasible: bool
    scores: Mapping[str, Score]

    @property
    def best_peer(self) -> str:
        """The cheapest peer that meets the target; otherwise the cheapest of those with the fewest late answers."""
        meeting = [name for name in PEERS if self.scores[name].meets(self.target)]
        if meeting:
            return min(meeting, key=lambda name: self.scores[name].replica_hours)
        return min(PEERS, key=lambda name: (self.scores[name].late, self.scores[name].replica_hours))

    @property
    def is_won(self) -> bool:
        ours, peer = self.scores["quire"], self.scores[self.best_peer]
        if peer.meets(self.target):
            return ours.meets(self.target) and ours.replica_hours <= HOURS * peer.replica_hours + _EPSILON
        return ours.late <= LATE * peer.late + _EPSILON and ours.replica_hours <= peer.replica_hours + _EPSILON

    @property
    def verdict(self) -> str:
        """The result: won or lost, against which peer, and by how much."""
        ours, name = self.scores["quire"], self.best_peer
        peer = self.scores[name]
        hours = ours.replica_hours / peer.replica_hours if peer.replica_hours > 0 else float("inf")
        word = "won" if self.is_won else "infeasible" if self.infeasible else "lost"
        if not peer.meets(self.target):
            late = ours.late / peer.late if peer.late > 0 else float("inf")
            return f"{word}: {late:.2f}× late, {hours:.2f}× h of {name}"
        return f"{word}: {hours:.2f}× h of {name}"

    def cells(self) -> list[str]:
        """Return the row of the table: % in time, replica-hours, changes per hour and longest queue of each policy."""
        case, texts = self.case, []
        for score in map(self.scores.__getitem__, COLUMNS):
            figures = (f"{100 * score.attainment:.1f}", f"{score.replica_hours:.2f}", f"{score.changes_per_hour:.0f}")
            text = " · ".join([*figures, str(score.worst_queue)])
            texts.append(f"**{text}**" if score.meets(self.target) else text)
        where = [case.load.name, f"{case.startup_delay_seconds:.0f} s", case.fault.value, f"{self.target:.0%}"]
        return [*where, *texts, self.verdict]

    def as_json(self) -> dict[str, Any]:
        names = ("attainment", "replica_hours", "changes_per_hour", "worst_queue")
        return {
            "trace": self.case.load.name,
            "startup_delay_seconds": self.case.startup_delay_seconds,
            "fault": self.case.fault.value,
            "target": self.target,
            "infeasible": self.infeasible,
            "policies": {
                name: {field: getattr(score, field) for field in names} for name, score in self.scores.items()
            },
        }


def rows_of(case: Case, seeds: Sequence[int]) -> list[Row]:
    """Return the rows of one case, the lower target first. Only our policy accepts the target."""
    statics = Statics(seeds)
    alike = {name: score_policy(case, seeds, POLICIES[name], TARGETS[0]) for name in PEERS}
    rows = []
    for target in TARGETS:
        oracle = statics.oracle(case, target)
        scores = {"quire": score_policy(case, seeds, POLICIES["quire"], target)} | alike
        bound = reactive_bound(case, seeds[:1], static=oracle.replicas)
        possible = bound.meets(target) or any(score.meets(target) for score in scores.values())
        rows.append(Row(case=case, target=target, infeasible=not possible, scores=scores | {ORACLE: oracle.score}))
    return rows


def measured(chosen: Sequence[Case], seeds: Sequence[int], jobs: int) -> list[Row]:
    """Return the rows of all cases, which are simulated in ``jobs`` processes."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows: dict[int, list[Row]] = {}
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
        ProcessPoolExecutor(jobs, initializer=_leave_interrupts) as pool,
    ):
        task = progress.add_task("cases", total=len(chosen))
        futures = {pool.submit(rows_of, case, seeds): place for place, case in enumerate(chosen)}
        try:
            for future in as_completed(futures):
                place = futures[future]
                # The row has a copy of the case, whose trace is long.
                rows[place] = [replace(row, case=chosen[place]) for row in future.result()]
                progress.advance(task)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [row for place in sorted(rows) for row in rows[place]]


def _leave_interrupts() -> None:
    """Leave interrupts to the parent, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


# --- the command ---


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Count the feasible rows that are won."""
    for target in sorted({row.target for row in rows}):
        there = [row for row in rows if row.target == target]
        possible = [row for row in there if not row.infeasible]
        won = sum(row.is_won for row in possible)
        meets = sum(row.scores["quire"].meets(target) for row in possible)
        left = len(there) - len(possible)
        yield f"{target:.0%}: {won} of {len(possible)} rows won, met in {meets}; {left} infeasible"


def loads_of(names: Sequence[str]) -> list[Load]:
    """Return the loads of the named traces. Raise TraceError."""
    files: dict[str, Load] = {}
    for name in names:
        if name == DAY:
            continue
        try:
            files[name] = load_of(Path(name))
        except OSError as error:
            raise TraceError(f"cannot read the trace {name}: {error.strerror}") from None
        except TraceError as error:
            raise TraceError(f"{name}: {error}") from None
    lengths = next(iter(files.values())).requests if files else load_of(SLICE).requests
    return [day_shaped(lengths) if name == DAY else files[name] for name in names]


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", action="append", metavar="FILE", help=f"or {DAY}; may be given again (a slice)")
    parser.add_argument("--seeds", type=report.at_least_one, default=1, help="means are over so many, up to three")
    parser.add_argument("--jobs", type=report.at_least_one, default=len(report.usable_cpus()), help="(%(default)s)")
    parser.add_argument("--delay", type=float, action="append", choices=STARTUP_DELAYS, help="only this start-up delay")
    parser.add_argument("--fault", type=FaultKind, action="append", choices=list(FaultKind), help="only this fault")
    arguments = parser.parse_args()
    try:
        loads = loads_of(arguments.trace or [str(SLICE)])
    except TraceError as error:
        sys.exit(f"run.py: {error}")
    delays, faults = arguments.delay or STARTUP_DELAYS, arguments.fault or tuple(FaultKind)
    chosen = [case for load in loads for case in cases(load, delays=delays, faults=faults)]
    try:
        rows = measured(chosen, SEEDS[: arguments.seeds], arguments.jobs)
    except KeyboardInterrupt:
        sys.exit(130)
    head = ["trace", "start-up", "fault", "target", *COLUMNS, "result"]
    for line in (head, ["---"] * len(head), *(row.cells() for row in rows)):
        print("|", " | ".join(line), "|")
    print("\n".join(summary(rows)))
    if arguments.json:
        report.write_json(arguments.json, {"rows": [row.as_json() for row in rows]})


if __name__ == "__main__":
    main()
