"""All laws in all cases of some loads, as the rows that are written and told; and who wins a row.

A row is won by the goal's rule: where peers meet the target, ours meets it too at no more than ``HOURS`` of the
replica-hours of the cheapest of them; where none does, ours halves the late share of the peer with the fewest late
answers at no more hours than that peer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from laws import LAWS, PEERS, Parameters
from scenarios import TARGETS, Case
from scoring import Score, Statics, reactive_bound, run_law, score_of

HOURS = 0.9
LATE = 0.5
ORACLE = "oracle"
_EPSILON = 1e-9

Configurations = Mapping[str, Parameters]
Told = Callable[[str], None]


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
        """The cheapest that meets the target; where none does, the one with the fewest late, then the cheapest."""
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


def simulations(cases: int, seeds: Sequence[int]) -> int:
    """How many there are at least, for a progress bar; the search for the oracle adds some."""
    each = sum(len(TARGETS) if law.follows_target else 1 for law in LAWS.values())
    return cases * (each * len(seeds) + len(TARGETS))


def rows_of(cases: Sequence[Case], configurations: Configurations, seeds: Sequence[int], *, told: Told) -> list[Row]:
    """Case by case, the lower target first. ``told`` hears of each simulation that is done."""
    statics = Statics(seeds, told=partial(told, "hindsight"))
    rows: list[Row] = []
    for case in cases:
        where = f"{case.load.name}, {case.startup_delay_seconds:.0f} s, {case.fault.value}"

        def score(name: str, target: float, case: Case = case, where: str = where) -> Score:
            make = partial(LAWS[name].scaler, configurations[name], case.load, target)
            runs = []
            for seed in seeds:
                runs.append(run_law(case, seed, make))
                told(f"{where}: {name}")
            return score_of(runs)

        alike = {name: score(name, TARGETS[0]) for name, law in LAWS.items() if not law.follows_target}
        for target in TARGETS:
            own = {name: score(name, target) for name, law in LAWS.items() if law.follows_target}
            oracle = statics.oracle(case, target)
            bound = reactive_bound(case, seeds[:1], static=oracle.replicas)
            told(f"{where}: bound")
            possible = bound.meets(target) or any(score.meets(target) for score in (own | alike).values())
            rows.append(
                Row(
                    case=case,
                    target=target,
                    infeasible=not possible,
                    scores=own | alike | {ORACLE: oracle.score},
                    oracle_replicas=oracle.replicas,
                )
            )
    return rows
