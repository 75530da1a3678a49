"""The rows as a table: one line each, the winner, and the number of rows won."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.autoscaling.matrix import ORACLE, Row
from benchmarks.autoscaling.registry import PEERS

COLUMNS = ("quire", *PEERS, ORACLE)


def cell(row: Row, name: str) -> str:
    score = row.scores[name]
    mark = "✓" if score.meets(row.target) else "✗"
    return f"{mark} {score.attainment:.1%} {score.replica_hours:.2f}h"


def verdict(row: Row) -> str:
    """Return whether the row is won or lost, against which peer, and by how much."""
    ours, name = row.scores["quire"], row.best_peer
    peer = row.scores[name]
    hours = ours.replica_hours / peer.replica_hours if peer.replica_hours > 0 else float("inf")
    word = "won" if row.is_won else "infeasible" if row.infeasible else "lost"
    if not peer.meets(row.target):
        late = ours.late / peer.late if peer.late > 0 else float("inf")
        return f"{word}: {late:.2f}× late, {hours:.2f}× h of {name}"
    return f"{word}: {hours:.2f}× h of {name}"


def show(console: Console, rows: Sequence[Row]) -> None:
    table = Table(title="Answers in time, and replica-hours; ✓ meets the target", title_justify="left", show_edge=False)
    for column in ("trace", "start-up", "fault", "target"):
        table.add_column(column)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            row.case.load.name,
            f"{row.case.startup_delay_seconds:.0f} s",
            row.case.fault.value,
            f"{row.target:.0%}",
            *(cell(row, name) for name in COLUMNS),
            verdict(row),
            style="dim" if row.infeasible else None,
        )
    console.print(table)
    console.print(summary(rows), highlight=False)


def summary(rows: Sequence[Row]) -> str:
    """Count the feasible rows that are won."""
    lines = []
    for target in sorted({row.target for row in rows}):
        there = [row for row in rows if row.target == target]
        possible = [row for row in there if not row.infeasible]
        won = sum(row.is_won for row in possible)
        meets = sum(row.scores["quire"].meets(target) for row in possible)
        lines.append(
            f"{target:.0%}: {won} of {len(possible)} rows won, met in {meets}; {len(there) - len(possible)} infeasible"
        )
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """Return the table for docs/, with the other promises for each row."""
    head = ["trace", "start-up", "fault", "target", *COLUMNS, "verdict"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [
            row.case.load.name,
            f"{row.case.startup_delay_seconds:.0f} s",
            row.case.fault.value,
            f"{row.target:.0%}",
            *(_rich_cell(row, name) for name in COLUMNS),
            verdict(row),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rich_cell(row: Row, name: str) -> str:
    score = row.scores[name]
    text = (
        f"{100 * score.attainment:.1f} · {score.replica_hours:.2f} · {score.changes_per_hour:.0f} · {score.worst_queue}"
    )
    return f"**{text}**" if score.meets(row.target) else text
