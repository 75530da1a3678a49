"""The score of one policy in one case, simulated with every seed, and the two references of each case."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from benchmarks.autoscaling.loads import costs
from benchmarks.autoscaling.policies.static import ReactiveBound, StaticScaler
from benchmarks.autoscaling.scenarios import MAX_REPLICAS, Case, FaultKind
from quire_cli.simulation.fleet import Scaler, simulate
from quire_cli.simulation.results import SimulatedRun

_MOST_STATIC = 64


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


def run_policy(case: Case, seed: int, make: Callable[[], Scaler]) -> SimulatedRun:
    return simulate(case.requests(seed), case.scenario(seed), make())


def score_policy(case: Case, seeds: Sequence[int], make: Callable[[], Scaler]) -> Score:
    return score_of([run_policy(case, seed, make) for seed in seeds])


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
    """Return the score of the reactive bound; see ``policies.static``."""
    runs = []
    for seed in seeds:
        requests = case.requests(seed)
        unknown = [replace(request, prefix_blocks=()) for request in requests]
        scaler = ReactiveBound(requests, costs(unknown, case.load.engine), static=static, maximum=MAX_REPLICAS)
        runs.append(simulate(requests, case.scenario(seed), scaler))
    return score_of(runs)
