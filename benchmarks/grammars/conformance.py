#!/usr/bin/env python3
"""Compile a collection of JSON schemas, and let the accepted ones judge the instances that the collection has.

    python -m benchmarks.grammars.conformance FOLDER [--limit N] [--list] [--json FILE]

FOLDER has JSON files in the shape of MaskBench (JSONSchemaBench with instances), of the JSON-Schema-Test-Suite, or
schemas alone. A schema that is refused must have a reason; it is counted by the keyword that the reason names. The exit
status is 1 if an accepted schema accepts an invalid instance.
"""

import random
import re
import sys
from argparse import Namespace
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from time import thread_time

from benchmarks.grammars.schemas import GrammarError, Grammars, SchemaCase, read_schemas
from benchmarks.report import at_least_one, machine, parser, progress, save, show_table

DEADLINE_SECONDS = 0.9
"""The time after which a server refuses a grammar (``GrammarLimits.wall_seconds``)."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """The results of one collection."""

    schemas: int = 0
    accepted: int = 0
    right: int = 0
    invalid_accepted: list[str] = field(default_factory=list)
    valid_refused: list[str] = field(default_factory=list)
    refusals: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    """CPU time of each compilation with its trial."""
    slow: list[str] = field(default_factory=list)
    """Schemas whose compilation takes longer than a server allows."""

    def add(self, case: SchemaCase, grammars: Grammars) -> None:
        """Compile one schema and judge its instances."""
        self.schemas += 1
        began = thread_time()
        try:
            grammar = grammars.compile(case.schema)
        except GrammarError as error:
            self.refusals[subject(str(error))] += 1
            return
        finally:
            self.seconds.append(thread_time() - began)
            if self.seconds[-1] > DEADLINE_SECONDS:
                self.slow.append(case.name)
        self.accepted += 1
        for number, instance in enumerate(case.instances):
            found = grammars.accepts(grammar, instance.value)
            if found == instance.valid:
                self.right += 1
            else:
                (self.valid_refused if instance.valid else self.invalid_accepted).append(f"{case.name} {number}")


def subject(reason: str) -> str:
    """Return the keyword that the reason of a refusal names, or the beginning of the reason."""
    if keys := re.fullmatch(r"the keyword (.*) is not supported", reason):
        return ", ".join(sorted(re.findall(r'"([^"]+)"', keys[1])))
    if found := re.match(r"(oneOf|patternProperty|allOf|anyOf|not|if)\b", reason):
        return found[1]
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "…", reason)[:60]


def measure(arguments: Namespace) -> dict[str, Tally]:
    """Return a tally per collection."""
    cases = list(read_schemas(arguments.folder))
    if not cases:
        raise SystemExit(f"{arguments.folder}: it has no JSON files with schemas")
    if arguments.limit is not None and arguments.limit < len(cases):
        cases = random.Random(7).sample(cases, arguments.limit)
    grammars = Grammars()
    tallies: dict[str, Tally] = {}
    with progress() as shown:
        task = shown.add_task("schemas", total=len(cases))
        for case in cases:
            tallies.setdefault(case.group, Tally()).add(case, grammars)
            shown.advance(task)
    return dict(sorted(tallies.items()))


def total_of(tallies: dict[str, Tally]) -> Tally:
    """Return the sum of all collections."""
    total = Tally()
    for tally in tallies.values():
        total.schemas += tally.schemas
        total.accepted += tally.accepted
        total.right += tally.right
        total.invalid_accepted += tally.invalid_accepted
        total.valid_refused += tally.valid_refused
        total.refusals.update(tally.refusals)
        total.seconds += tally.seconds
        total.slow += tally.slow
    return total


def _cells(name: str, tally: Tally) -> tuple[str, ...]:
    times = sorted(tally.seconds)
    return (
        name,
        str(tally.schemas),
        f"{tally.accepted} ({tally.accepted / tally.schemas:.0%})",
        str(tally.right),
        str(len(tally.invalid_accepted)),
        str(len(tally.valid_refused)),
        f"{sum(times) / len(times) * 1e3:.1f} ms",
        f"{times[int(len(times) * 0.99)] * 1e3:.0f} ms",
        str(len(tally.slow)),
    )


def main() -> int:
    """Run the benchmark. Return the exit status."""
    options = parser(__doc__, plot=False)
    options.add_argument("folder", type=Path, metavar="FOLDER", help="a folder with JSON files")
    options.add_argument("--limit", type=at_least_one, metavar="N", help="use N schemas, chosen at random (seed 7)")
    options.add_argument("--list", action="store_true", help="list the instances that are judged wrongly")
    arguments = options.parse_args()
    tallies = measure(arguments)
    total = total_of(tallies)
    judged = ("schemas", "accepted", "instances right", "invalid accepted", "valid refused")
    columns = ("collection", *judged, "compile, mean", "p99", f"over {DEADLINE_SECONDS} s")
    rows = [_cells(name, tally) for name, tally in tallies.items() if len(tallies) > 1]
    show_table(f"JSON schemas of {arguments.folder.name}", columns, [*rows, _cells("all", total)], [machine()])
    refusals = [(reason, str(count)) for reason, count in total.refusals.most_common(20)]
    show_table("refused", ("keyword or reason", "schemas"), refusals)
    if arguments.list:
        for name in total.invalid_accepted:
            print("invalid accepted:", name)
        for name in total.valid_refused:
            print("valid refused:", name)
    save(
        arguments.json,
        [
            {
                "collection": name,
                "schemas": tally.schemas,
                "accepted": tally.accepted,
                "right": tally.right,
                "invalid_accepted": tally.invalid_accepted,
                "valid_refused": tally.valid_refused,
                "refusals": dict(tally.refusals.most_common()),
                "slow": tally.slow,
            }
            for name, tally in {**tallies, "all": total}.items()
        ],
    )
    return 1 if total.invalid_accepted else 0


if __name__ == "__main__":
    sys.exit(main())
