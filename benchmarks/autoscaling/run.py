#!/usr/bin/env python3
"""Compare every policy on a trace: start-up delays of 30, 120 and 420 s, with and without faults, two targets.

    python -m benchmarks.autoscaling.run --trace azure_llm_2023_code.csv --json rows.json

A trace is a CSV of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) or JSON lines of Mooncake's
(timestamp in ms, input_length, output_length, hash_ids). ``--trace day`` is the day-shaped one, which has the lengths
of the committed slice, or of the first trace given. docs/autoscaling.md describes the comparison; ``registry.py`` and
``tuned/`` contain the settings.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.autoscaling.loads import DAY, Load, day_shaped, load_of
from benchmarks.autoscaling.matrix import Configurations, Row, rows_of, simulations
from benchmarks.autoscaling.plots import plot_rows, plot_timeline
from benchmarks.autoscaling.registry import POLICIES, ConfigurationError, tuned
from benchmarks.autoscaling.scenarios import SEEDS, STARTUP_DELAYS, TARGETS, Case, FaultKind, cases
from benchmarks.autoscaling.scoring import run_policy, score_policy
from benchmarks.autoscaling.tables import markdown, show
from quire_cli.simulation.traces import TraceError

SLICE = report.ROOT / "benchmarks" / "traces" / "azure_llm_2023_code_slice.csv"
_MINUTES = 8


def main() -> None:
    arguments = _parser().parse_args()
    try:
        configurations = {name: tuned(policy) for name, policy in POLICIES.items()}
        loads = loads_of(arguments.trace or [str(SLICE)])
        delays, faults = arguments.delay or STARTUP_DELAYS, arguments.fault or tuple(FaultKind)
        chosen = [case for load in loads for case in cases(load, delays=delays, faults=faults)]
        seeds = arguments.seeds or affordable(chosen, configurations, arguments.jobs)
        rows = measured(chosen, configurations, tuple(range(seeds)), jobs=arguments.jobs)
    except (TraceError, ConfigurationError) as error:
        sys.exit(f"run.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    show(Console(width=None if sys.stdout.isatty() else 230), rows)
    if arguments.json:
        report.write_json(arguments.json, {"rows": [row.as_json() for row in rows]})
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows), encoding="utf-8")
    if arguments.plot:
        plot_rows(arguments.plot, rows)
    if arguments.timeline:
        for case in {case.load: case for case in reversed(chosen)}.values():
            runs = {
                name: run_policy(case, 0, partial(policy.scaler, configurations[name], case.load, TARGETS[0]))
                for name, policy in POLICIES.items()
            }
            path = arguments.timeline.with_stem(f"{arguments.timeline.stem}-{case.load.name}")
            plot_timeline(path, case.title, runs)


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


def affordable(chosen: Sequence[Case], configurations: Configurations, jobs: int) -> int:
    """Return how many seeds fit into ``_MINUTES``, at least one, from one simulation of each policy in each trace."""
    loads = {case.load: case for case in chosen}
    started = monotonic()
    for load, case in loads.items():
        for name, policy in POLICIES.items():
            score_policy(case, (0,), partial(policy.scaler, configurations[name], load, TARGETS[0]))
    each = (monotonic() - started) / len(loads) / len(POLICIES)
    minutes = [each * simulations(chosen, seeds + 1) / jobs / 60 for seeds in range(len(SEEDS))]
    count = max([1, *(place for place, needed in enumerate(minutes, start=1) if needed <= _MINUTES)])
    noun = "seed" if count == 1 else "seeds"
    print(f"{count} {noun} of {len(SEEDS)}: about {max(1, round(minutes[count - 1]))} min; --seeds asks for others")
    return count


def measured(
    chosen: Sequence[Case], configurations: Configurations, seeds: Sequence[int], *, jobs: int = 1
) -> list[Row]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulations", total=simulations(chosen, len(seeds)))
        advance = partial(progress.advance, task)
        return rows_of(chosen, configurations, seeds, advance=advance, jobs=jobs)


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__)
    parser.add_argument("--trace", action="append", metavar="FILE", help=f"or {DAY}; may be given again (a slice)")
    parser.add_argument(
        "--seeds",
        type=report.at_least_one,
        help=f"means are over so many (up to {len(SEEDS)}: what {_MINUTES} minutes allow)",
    )
    parser.add_argument(
        "--jobs", type=report.at_least_one, default=len(report.usable_cpus()), help="processes (%(default)s)"
    )
    parser.add_argument("--delay", type=float, action="append", choices=STARTUP_DELAYS, help="only this start-up delay")
    parser.add_argument("--fault", type=FaultKind, action="append", choices=list(FaultKind), help="only this fault")
    parser.add_argument("--markdown", type=report.writable, metavar="FILE", help="write the table to this file")
    parser.add_argument(
        "--timeline",
        type=report.plot_file,
        metavar="FILE",
        help="plot each trace's first case over time, to FILE-TRACE",
    )
    return parser


if __name__ == "__main__":
    main()
