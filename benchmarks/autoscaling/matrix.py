"""All policies in all cases of some loads: the rows that are written and shown, and the winner of each row.

A row is won by the goal's rule: if peers meet the target, our policy meets it too with no more than ``HOURS`` of the
replica-hours of the cheapest of them; otherwise it halves the late share of the peer with the fewest late answers
without more hours than that peer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.autoscaling.registry import PEERS, POLICIES, Parameters
from benchmarks.autoscaling.scenarios import TARGETS, Case
from benchmarks.autoscaling.scoring import Oracle, Score, Statics, reactive_bound, score_policy
from benchmarks.autoscaling.workers import Workers

HOURS = 0.9
LATE = 0.5
ORACLE = "oracle"
_EPSILON = 1e-9
_SEARCH = 10
"""The approximate number of simulations per seed that a search for hindsight static needs."""

Configurations = Mapping[str, Parameters]
Oracles = Mapping[float, Oracle]
"""The oracles by target."""
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case under one target."""

    case: Case
    target: float
    infeasible: bool
    scores: Mapping[str, Score]
    oracle_replicas: int

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

    def as_json(self) -> dict[str, Any]:
        return {
            "trace": self.case.load.name,
            "startup_delay_seconds": self.case.startup_delay_seconds,
            "fault": self.case.fault.value,
            "target": self.target,
            "infeasible": self.infeasible,
            "policies": {
                name: {
                    "attainment": score.attainment,
                    "replica_hours": score.replica_hours,
                    "changes_per_hour": score.changes_per_hour,
                    "worst_queue": score.worst_queue,
                }
                for name, score in self.scores.items()
            },
        }


def simulations(cases: Sequence[Case], seeds: int) -> int:
    """Return the number of simulations; those that search for hindsight static are an estimate."""
    policies = sum(len(TARGETS) if policy.follows_target else 1 for policy in POLICIES.values())
    return len(cases) * (policies * seeds + len(TARGETS)) + len(_alike(cases)) * _SEARCH * seeds


def rows_of(
    cases: Sequence[Case], configurations: Configurations, seeds: Sequence[int], *, advance: Advance, jobs: int = 1
) -> list[Row]:
    """Return the rows case by case, the lower target first.

    ``advance`` is called with the number of finished simulations.
    """
    with Workers(jobs) as workers:
        groups = list(_alike(cases))
        found = workers.map(_oracles, [(group, seeds) for group in groups])
        oracles: dict[Case, Oracles] = {}
        for place, oracle in found:
            oracles[groups[place]] = oracle
            advance(_SEARCH * len(seeds))
        tasks = [(case, configurations, seeds, oracles[Statics.alike(case)]) for case in cases]
        rows: dict[int, list[Row]] = {}
        for place, results in workers.map(_results, tasks):
            rows[place] = [_row(cases[place], target, result) for target, result in results.items()]
            advance(simulations([cases[place]], len(seeds)) - _SEARCH * len(seeds))
    return [row for place in sorted(rows) for row in rows[place]]


def _alike(cases: Sequence[Case]) -> dict[Case, None]:
    """Return the cases that differ for a fixed number of replicas."""
    return dict.fromkeys(Statics.alike(case) for case in cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """The content of a row without its case, whose trace is long."""

    infeasible: bool
    scores: Mapping[str, Score]
    oracle_replicas: int


def _row(case: Case, target: float, result: _Result) -> Row:
    return Row(
        case=case,
        target=target,
        infeasible=result.infeasible,
        scores=result.scores,
        oracle_replicas=result.oracle_replicas,
    )


def _oracles(case: Case, seeds: Sequence[int]) -> Oracles:
    statics = Statics(seeds)
    return {target: statics.oracle(case, target) for target in TARGETS}


def _results(
    case: Case, configurations: Configurations, seeds: Sequence[int], oracles: Oracles
) -> dict[float, _Result]:
    def score(name: str, target: float) -> Score:
        return score_policy(case, seeds, partial(POLICIES[name].scaler, configurations[name], case.load, target))

    alike = {name: score(name, TARGETS[0]) for name, policy in POLICIES.items() if not policy.follows_target}
    results: dict[float, _Result] = {}
    for target, oracle in oracles.items():
        policies = alike | {name: score(name, target) for name, policy in POLICIES.items() if policy.follows_target}
        bound = reactive_bound(case, seeds[:1], static=oracle.replicas)
        possible = bound.meets(target) or any(score.meets(target) for score in policies.values())
        results[target] = _Result(
            infeasible=not possible, scores=policies | {ORACLE: oracle.score}, oracle_replicas=oracle.replicas
        )
    return results
