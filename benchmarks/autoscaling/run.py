#!/usr/bin/env python3
"""Every law on a trace: start-up delays of 30, 120 and 420 s, with and without faults, at 95 % and 99 % in time.

    python benchmarks/autoscaling/run.py --trace azure_llm_2023_code.csv --json rows.json

A trace is a CSV of Azure's LLM inference traces (TIMESTAMP, ContextTokens, GeneratedTokens) or JSON lines of
Mooncake's (timestamp in ms, input_length, output_length, hash_ids). ``--trace day`` is the day-shaped one, which is
made of the lengths of the committed slice, or of the first trace given. docs/autoscaling.md says how the laws are
compared; ``laws.py`` and ``tuned/`` what they are set to.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from laws import LAWS, ConfigurationError, tuned
from loads import DAY, Load, day_shaped, load_of
from matrix import Configurations, Row, rows_of, simulations
from plots import plot_rows, plot_timeline
from quire_cli.bench.traces import TraceError
from scenarios import SEEDS, STARTUP_DELAYS, TARGETS, Case, FaultKind, cases
from scoring import run_law, score_law
from tables import markdown, show
from workers import usable_cores

SLICE = Path(__file__).resolve().parents[1] / "kv" / "azure_llm_2023_code_slice.csv"
PLOT_FORMATS = (".png", ".svg", ".pdf")
_MINUTES = 8


def main() -> None:
    arguments = _parser().parse_args()
    try:
        configurations = {name: tuned(law) for name, law in LAWS.items()}
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
        arguments.json.write_text(json.dumps({"rows": [row.as_json() for row in rows]}, indent=1) + "\n", "utf-8")
    if arguments.markdown:
        arguments.markdown.write_text(markdown(rows), encoding="utf-8")
    if arguments.plot:
        plot_rows(arguments.plot, rows)
    if arguments.timeline:
        for case in {case.load: case for case in reversed(chosen)}.values():
            runs = {
                name: run_law(case, 0, partial(law.scaler, configurations[name], case.load, TARGETS[0]))
                for name, law in LAWS.items()
            }
            path = arguments.timeline.with_stem(f"{arguments.timeline.stem}-{case.load.name}")
            plot_timeline(path, case.title, runs)


def loads_of(names: Sequence[str]) -> list[Load]:
    """Raises TraceError."""
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
    """So many seeds as take ``_MINUTES``, judged by one simulation of each law in each trace; one at least."""
    loads = {case.load: case for case in chosen}
    started = monotonic()
    for load, case in loads.items():
        for name, law in LAWS.items():
            score_law(case, (0,), partial(law.scaler, configurations[name], load, TARGETS[0]))
    each = (monotonic() - started) / len(loads) / len(LAWS)
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
        told = partial(progress.advance, task)
        return rows_of(chosen, configurations, seeds, told=told, jobs=jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", action="append", metavar="FILE", help=f"or {DAY}; may be given again (a slice)")
    parser.add_argument(
        "--seeds",
        type=at_least_one,
        help=f"means are over so many (up to {len(SEEDS)}: what {_MINUTES} minutes allow)",
    )
    parser.add_argument("--jobs", type=at_least_one, default=usable_cores(), help="processes (%(default)s)")
    parser.add_argument("--delay", type=float, action="append", choices=STARTUP_DELAYS, help="only this start-up delay")
    parser.add_argument("--fault", type=FaultKind, action="append", choices=list(FaultKind), help="only this fault")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="write the rows there")
    parser.add_argument("--markdown", type=_writable, metavar="FILE", help="write the table there")
    parser.add_argument("--plot", type=_drawable, metavar="FILE", help="draw them there (.png, .svg or .pdf)")
    parser.add_argument(
        "--timeline", type=_drawable, metavar="FILE", help="draw each trace's first case over time, to FILE-TRACE"
    )
    return parser


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be a whole number, 1 or more")
    return int(text)


def _writable(text: str) -> Path:
    """Found out before anything is simulated."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {path}: {error.strerror}") from None
    return path


def _drawable(text: str) -> Path:
    if Path(text).suffix not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text} should end in one of {', '.join(PLOT_FORMATS)}")
    return _writable(text)


if __name__ == "__main__":
    main()
