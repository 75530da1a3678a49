"""What a run found: seconds, asserted requests and figures of each scenario; the table people read. Pure.

A figure is a number that documents may quote: ``report.figure("apply to Ready", 9.2, "s")``. The same run also writes
them to out/e2e/results.json.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    value: float
    unit: str

    def __str__(self) -> str:
        return f"{self.name} {self.measured}"

    @property
    def measured(self) -> str:
        return f"{amount(self.value)} {self.unit}".rstrip()


@dataclass(slots=True, kw_only=True)
class Report:
    """Of one scenario; filled while it runs."""

    scenario: str
    seconds: float = 0.0
    outcome: str = "not run"
    """passed, failed, or why it was not run."""
    requests: int = 0
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What this cluster could or could not show."""

    def figure(self, name: str, value: float, unit: str = "s") -> None:
        """One that is given again replaces the one before."""
        self.figures = [known for known in self.figures if known.name != name]
        self.figures.append(Figure(name=name, value=float(value), unit=unit))

    def note(self, text: str) -> None:
        """What the reader of this run has to know."""
        self.notes.append(text)

    def count_requests(self, number: int) -> None:
        """Whose answers were all looked at."""
        self.requests += number


def amount(value: float) -> str:
    """Three digits that count, and whole numbers whole."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(reports: Sequence[Report]) -> list[str]:
    """For a terminal: scenario, seconds, requests, figures."""
    rows = [("scenario", "seconds", "requests", "figures")]
    rows += [
        (
            report.scenario,
            f"{report.seconds:.0f}",
            str(report.requests or ""),
            "; ".join([*map(str, report.figures), *report.notes]),
        )
        for report in reports
    ]
    total = sum(report.seconds for report in reports)
    rows.append(("all", f"{total:.0f}", str(sum(report.requests for report in reports)), ""))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [_line(row, widths) for row in rows]


def _line(row: tuple[str, str, str, str], widths: Sequence[int]) -> str:
    name, seconds, requests, figures = row
    return f"{name:<{widths[0]}}  {seconds:>{widths[1]}}  {requests:>{widths[2]}}  {figures}".rstrip()


def markdown(reports: Iterable[Report]) -> str:
    """The promises, one a row."""
    rows = [f"| {f.name} | {f.measured} | {r.scenario} |" for r in reports for f in r.figures]
    return "\n".join(["| promise | measured | scenario |", "|---|---|---|", *rows]) + "\n"


def document(reports: Sequence[Report], *, cluster: str, started: str) -> dict[str, Any]:
    """results.json."""
    return {"started": started, "cluster": cluster, "scenarios": [_scenario(report) for report in reports]}


def fails_the_run(reports: Iterable[Report], *, on_ours: bool) -> bool:
    """Whether something was left out where nothing may be: our own cluster has all that scenarios need."""
    return on_ours and any(True for _ in not_run(reports))


def not_run(reports: Iterable[Report]) -> Iterator[str]:
    """Names and reasons of those that could not be."""
    for report in reports:
        if report.outcome not in ("passed", "failed"):
            yield f"{report.scenario}: {report.outcome}"


def _scenario(report: Report) -> dict[str, Any]:
    return asdict(report) | {"seconds": round(report.seconds, 2)}


def scenario_name(test_id: str) -> str:
    """tests/e2e/test_install.py::test_a_fresh_one[x] → install: a fresh one [x]"""
    path, _, test = test_id.partition("::")
    subject = Path(path).stem.removeprefix("test_").replace("_", " ")
    return f"{subject}: {test.removeprefix('test_').replace('_', ' ').replace('[', ' [')}"


def slug(text: str) -> str:
    """For names of files and namespaces."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
