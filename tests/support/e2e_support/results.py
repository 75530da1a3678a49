"""Results of a run: seconds, checked requests and figures of each scenario, and their tables. Pure.

A figure is a number that documents may quote: ``report.figure("apply to Ready", 9.2, "s")``. The run also writes the
figures to out/e2e/results.json.
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
    """The report of one scenario, filled while it runs."""

    scenario: str
    seconds: float = 0.0
    outcome: str = "not run"
    """The outcome: passed, failed, or the reason why it did not run."""
    requests: int = 0
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes on what this cluster could or could not show."""

    def figure(self, name: str, value: float, unit: str = "s") -> None:
        """Record a figure. A figure with the same name is replaced."""
        self.figures = [known for known in self.figures if known.name != name]
        self.figures.append(Figure(name=name, value=float(value), unit=unit))

    def note(self, text: str) -> None:
        """Record a note for the reader of this run."""
        self.notes.append(text)

    def count_requests(self, number: int) -> None:
        """Add to the number of checked requests."""
        self.requests += number


def amount(value: float) -> str:
    """Format a number with three significant digits; integers stay complete."""
    if value == int(value) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def table(reports: Sequence[Report]) -> list[str]:
    """Return the table for a terminal: scenario, seconds, requests, figures."""
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
    """Return the figures as a Markdown table."""
    rows = [f"| {f.name} | {f.measured} | {r.scenario} |" for r in reports for f in r.figures]
    return "\n".join(["| promise | measured | scenario |", "|---|---|---|", *rows]) + "\n"


def document(reports: Sequence[Report], *, cluster: str, started: str) -> dict[str, Any]:
    """Return the content of results.json."""
    return {"started": started, "cluster": cluster, "scenarios": [_scenario(report) for report in reports]}


def fails_the_run(reports: Iterable[Report], *, on_ours: bool) -> bool:
    """Return True if a scenario was skipped on our own cluster, which has all capabilities."""
    return on_ours and any(True for _ in not_run(reports))


def not_run(reports: Iterable[Report]) -> Iterator[str]:
    """Return names and reasons of the scenarios that could not run."""
    for report in reports:
        if report.outcome not in ("passed", "failed"):
            yield f"{report.scenario}: {report.outcome}"


def _scenario(report: Report) -> dict[str, Any]:
    return asdict(report) | {"seconds": round(report.seconds, 2)}


def scenario_name(test_id: str) -> str:
    """Convert tests/e2e/test_install.py::test_a_fresh_one[x] to install: a fresh one [x]."""
    path, _, test = test_id.partition("::")
    subject = Path(path).stem.removeprefix("test_").replace("_", " ")
    return f"{subject}: {test.removeprefix('test_').replace('_', ' ').replace('[', ' [')}"


def slug(text: str) -> str:
    """Convert a name for use in names of files and namespaces."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
