#!/usr/bin/env python3
"""What the gateway makes of a fixed number of replicas: the share of answers in time, and of prompt tokens that were
found in the prefix cache. No law has a part in it.

    python benchmarks/autoscaling/static_fleets.py --trace azure_llm_2023_code.csv --trace day --replicas 8 12 16
"""

import argparse
import sys

from rich.console import Console
from rich.table import Table

from loads import Load
from policies.static import StaticScaler
from quire_cli.bench.traces import TraceError
from quire_cli.simulation.run import Run
from quire_cli.simulation.simulate import simulate
from run import at_least_one, loads_of
from scenarios import Case, FaultKind
from workers import Workers, usable_cores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", required=True, metavar="FILE", help="or day; may be given again")
    parser.add_argument("--replicas", type=int, nargs="+", default=(6, 8, 10, 12, 14, 18))
    parser.add_argument("--fault", type=FaultKind, choices=list(FaultKind), default=FaultKind.NONE)
    parser.add_argument("--jobs", type=at_least_one, default=usable_cores(), help="processes (%(default)s)")
    arguments = parser.parse_args()
    try:
        loads = loads_of(arguments.trace)
    except TraceError as error:
        sys.exit(f"static_fleets.py: {error}")
    table = Table(title="answers in time · prompt tokens cached", title_justify="left", show_edge=False)
    for column in ("trace", *map(str, arguments.replicas)):
        table.add_column(column, justify="right")
    with Workers(arguments.jobs) as workers:
        tasks = [(load, replicas, arguments.fault) for load in loads for replicas in arguments.replicas]
        found = dict(workers.map(cell, tasks))
    width = len(arguments.replicas)
    for row, load in enumerate(loads):
        table.add_row(load.name, *(found[row * width + place] for place in range(width)))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def cell(load: Load, replicas: int, fault: FaultKind) -> str:
    """As the table has it."""
    case = Case(load=load, startup_delay_seconds=120.0, fault=fault)
    run = simulate(case.requests(0), case.static(replicas, 0), StaticScaler(replicas))
    return f"{run.attainment():.1%} · {cached_share(run):.0%}"


def cached_share(run: Run) -> float:
    return sum(r.cached_tokens for r in run.requests) / sum(r.prompt_tokens for r in run.requests)


if __name__ == "__main__":
    main()
