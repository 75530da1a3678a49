#!/usr/bin/env python3
"""How much the result depends on each parameter of ours: every one times 0.5, 0.8, 1.25 and 2, the others as chosen.

    python benchmarks/autoscaling/sensitivity.py --trace mooncake_synthetic.jsonl --plot sensitivity.png

One case a trace (a start-up of 120 s, no fault, one seed), both targets. Where metrics come from is varied too: scraped
from the pods at the tick, or by a Prometheus each 15 s.
"""

import argparse
import sys
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from laws import QUIRE, Parameters, Value, tuned
from quire_cli.bench.traces import TraceError
from run import at_least_one, loads_of
from scenarios import TARGETS, Case, FaultKind
from scoring import Score, score_law
from workers import Workers, usable_cores

FACTORS = (0.5, 0.8, 1.25, 2.0)
AS_CHOSEN = "as chosen"
_WHOLE = ("up_max_step", "down_max_step")
_PROMETHEUS_SECONDS = 15.0
_STARTUP_SECONDS = 120.0


def variants(chosen: Parameters, only: Collection[str] = ()) -> dict[str, Parameters]:
    """By what was changed. A number of replicas is whole and at least 1. ``only``: no other parameters than these."""
    found: dict[str, Parameters] = {AS_CHOSEN: chosen}
    for name, value in chosen.items():
        if only and name not in only:
            continue
        if name == "scrape_seconds":
            found["metrics from Prometheus"] = {**chosen, name: _PROMETHEUS_SECONDS}
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        for factor in FACTORS:
            changed = _sane(name, value * factor)
            if changed != value:
                found.setdefault(f"{name} {value:g} → {changed:g}", {**chosen, name: changed})
    return found


def _sane(name: str, value: float) -> Value:
    return max(1, round(value)) if name in _WHOLE else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", required=True, metavar="FILE", help="or day; may be given again")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--only", action="append", choices=list(QUIRE.space), help="this one; may be given again (all)")
    parser.add_argument("--jobs", type=at_least_one, default=usable_cores(), help="processes (%(default)s)")
    arguments = parser.parse_args()
    try:
        loads = loads_of(arguments.trace)
    except TraceError as error:
        sys.exit(f"sensitivity.py: {error}")
    console = Console(width=None if sys.stdout.isatty() else 130)
    there = variants(tuned(QUIRE), arguments.only or ())
    for load in loads:
        case = Case(load=load, startup_delay_seconds=_STARTUP_SECONDS, fault=FaultKind.NONE)
        with Workers(arguments.jobs) as workers:
            done = workers.map(scores_of, [(case, parameters) for parameters in there.values()])
            shown = track(done, load.name, total=len(there), console=Console(stderr=True), transient=True)
            found = dict(shown)
        scores = {name: found[place] for place, name in enumerate(there)}
        console.print(_table(load.name, scores))
        if arguments.plot:
            _plot(arguments.plot.with_stem(f"{arguments.plot.stem}-{load.name}"), load.name, scores)


def scores_of(case: Case, parameters: Parameters) -> dict[float, Score]:
    """By target."""
    return {target: score_law(case, (0,), partial(QUIRE.scaler, parameters, case.load, target)) for target in TARGETS}


def _table(title: str, scores: Mapping[str, Mapping[float, Score]]) -> Table:
    table = Table(title=f"{title}: answers in time, replica-hours", title_justify="left", show_edge=False)
    table.add_column("changed")
    for target in TARGETS:
        table.add_column(f"asked for {target:.0%}", justify="right")
    for name, by_target in scores.items():
        cells = (by_target[target] for target in TARGETS)
        table.add_row(name, *(f"{score.attainment:.2%} {score.replica_hours:.2f} h" for score in cells))
    return table


def _plot(path: Path, title: str, scores: Mapping[str, Mapping[float, Score]]) -> None:
    from matplotlib.figure import Figure  # slow to import, and only a plot needs it

    figure = Figure(figsize=(11, 0.22 * len(scores) + 1.5), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for target in TARGETS:
        values = [by_target[target] for by_target in scores.values()]
        left.plot([100 * score.late for score in values], range(len(values)), "o", label=f"asked for {target:.0%}")
        right.plot([score.replica_hours for score in values], range(len(values)), "o")
    left.set_yticks(range(len(scores)), list(scores), fontsize=7)
    left.invert_yaxis()
    left.set_xlabel("late answers, %")
    right.set_xlabel("replica-hours")
    left.legend(fontsize=8)
    figure.suptitle(f"{title}: one parameter changed at a time")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
