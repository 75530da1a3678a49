#!/usr/bin/env python3
"""Choose one configuration of one policy for all rows, by random search over its space with a fixed seed.

Half of the trials are sampled from the whole space, the other half from the best so far, with each parameter sampled
again with a probability of one in four.

    python -m benchmarks.autoscaling.tune hpa --trace azure_llm_2023_code.csv --trace mooncake_synthetic.jsonl

Every policy gets the same number of trials, the first of them its published defaults, on the same cases: the given
traces and the day-shaped one. The search minimizes the mean over cases and targets of

    replica-hours / hours of hindsight static  +  (0 if the target is met, else 1 + log2(late share / allowed share))

so a missed target costs more than any saving, and a narrow miss less than a wide one. A trial ends early once it cannot
become the best; its cost is then a lower bound. The best is written to ``tuned/POLICY.json`` with this command and
every trial's cost.
"""

import argparse
import json
import math
import random
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.autoscaling.loads import Load, day_shaped, load_of
from benchmarks.autoscaling.registry import POLICIES, TUNED, Parameters, Policy
from benchmarks.autoscaling.scenarios import TARGETS, Case, FaultKind
from benchmarks.autoscaling.scoring import Score, Statics, score_policy
from benchmarks.report import write_json
from quire_cli.simulation.traces import TraceError

TRIALS = 20
SEED = 20
_CASES = (
    (120.0, FaultKind.SCRAPE_OUTAGE),
    (420.0, FaultKind.NONE),
)
_SEEDS = (0,)
_REDRAWN = 0.25


def cost(score: Score, target: float, oracle_hours: float) -> float:
    """Return the cost of one row, as defined above."""
    hours = score.replica_hours / oracle_hours if oracle_hours > 0 else 0.0
    if score.meets(target):
        return hours
    return hours + 1 + math.log2(score.late / (1 - target))


def drawn(policy: Policy, trial: int, trials: int, best: Parameters) -> Parameters:
    """Return the parameters of a trial: the defaults first, then random ones, then neighbours of the best."""
    if trial == 0:
        return policy.defaults
    rng = random.Random(f"{SEED} {policy.name} {trial}")
    anew = {name: rng.choice(values) for name, values in policy.space.items()}
    if trial < trials / 2:
        return anew
    changed = {name for name in policy.space if rng.random() < _REDRAWN} or {rng.choice(sorted(policy.space))}
    return {name: anew[name] if name in changed else best[name] for name in policy.space}


def scores_of(policy: Policy, parameters: Parameters, case: Case) -> dict[float, Score]:
    """Return the scores by target; a policy that does not accept the target is simulated once."""
    if policy.follows_target:
        return {t: score_policy(case, _SEEDS, partial(policy.scaler, parameters, case.load, t)) for t in TARGETS}
    return dict.fromkeys(TARGETS, score_policy(case, _SEEDS, partial(policy.scaler, parameters, case.load, TARGETS[0])))


class Judge:
    """The cases, and the requirements of hindsight static in each."""

    def __init__(self, loads: Sequence[Load], progress: Progress) -> None:
        self._progress = progress
        self._cases = [
            Case(load=load, startup_delay_seconds=delay, fault=fault) for load in loads for delay, fault in _CASES
        ]
        statics = Statics(_SEEDS)
        task = progress.add_task("hindsight static", total=len(self._cases))
        self._hours: dict[tuple[Case, float], float] = {}
        for case in self._cases:
            for target in TARGETS:
                self._hours[case, target] = statics.oracle(case, target).score.replica_hours
            progress.advance(task)

    def cost(self, policy: Policy, parameters: Parameters, *, worth: float = math.inf) -> float:
        """Return the mean over the rows; stop early if it certainly exceeds ``worth``."""
        task = self._progress.add_task(f"{policy.name}", total=len(self._cases))
        total, rows = 0.0, len(self._cases) * len(TARGETS)
        for case in self._cases:
            for target, score in scores_of(policy, parameters, case).items():
                total += cost(score, target, self._hours[case, target])
            self._progress.advance(task)
            if total / rows > worth:
                break
        self._progress.remove_task(task)
        return total / rows


def search(policy: Policy, judge: Judge, trials: int, log: Any) -> tuple[Parameters, list[float]]:
    """Return the best parameters, and every trial's cost."""
    best = policy.defaults
    costs: list[float] = []
    for trial in range(trials):
        parameters = drawn(policy, trial, trials, best)
        costs.append(judge.cost(policy, parameters, worth=min(costs, default=math.inf)))
        if costs[-1] == min(costs):
            best = parameters
        log(f"{policy.name} {trial + 1}/{trials}: {costs[-1]:.3f} (best {min(costs):.3f}) {json.dumps(parameters)}")
    return best, costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", choices=sorted(POLICIES))
    parser.add_argument("--trace", action="append", type=Path, required=True, metavar="FILE")
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--out", type=Path, default=TUNED, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        loads = [load_of(path) for path in arguments.trace]
    except (TraceError, OSError) as error:
        sys.exit(f"cannot read the trace: {error}")
    loads.append(day_shaped(loads[0].requests))
    loads.sort(key=lambda load: len(load.requests))
    console = Console(stderr=True)
    policy = POLICIES[arguments.policy]
    with Progress(console=console, transient=True) as progress:
        best, costs = search(policy, Judge(loads, progress), arguments.trials, progress.console.print)
    traces = " ".join(f"--trace {path.name}" for path in arguments.trace)
    chosen = {
        "command": f"python -m benchmarks.autoscaling.tune {policy.name} {traces} --trials {arguments.trials}",
        "cost": min(costs),
        "costs": costs,
        "parameters": best,
    }
    path = arguments.out / f"{policy.name}.json"
    write_json(path, chosen)
    console.print(f"wrote {path}")


if __name__ == "__main__":
    main()
