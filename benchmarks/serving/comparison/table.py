"""The report of a comparison: the table, goals met and missed, the machine and its lower bound."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.serving.comparison.results import Row, Turn, Verdict, rows, run_ratios


def show(
    console: Console,
    turns: Sequence[Turn],
    verdicts: Sequence[Verdict],
    limits: Sequence[Mapping[str, Any]],
    *,
    floors: Mapping[str, float],
    title: str,
) -> None:
    table = rows(turns)
    console.print(_medians(turns, table, floors, title))
    if verdicts:
        console.print(_goals(verdicts))
    for line in limit_lines(limits):
        console.print(line, highlight=False)
    for turn in turns:
        if turn.problem is not None:
            console.print(f"{turn.server}, run {turn.run}: {turn.problem}", style="red", markup=False, highlight=False)


def _medians(turns: Sequence[Turn], table: Sequence[Row], floors: Mapping[str, float], title: str) -> Table:
    shown = Table(title=title, title_justify="left", show_edge=False)
    shown.add_column("in/out@at a time")
    shown.add_column("server")
    columns = (
        "total tok/s",
        "least–most",
        "of floor",
        "out tok/s",
        "TTFT ms",
        "ITL ms",
        "TPOT ms",
        "start s",
        "peak MiB",
        "quire is",
    )
    for column in columns:
        shown.add_column(column, justify="right")
    for workload in dict.fromkeys(row.workload for row in table):
        together = [row for row in table if row.workload == workload]
        for row in together:
            ratios = run_ratios(turns, "quire", row.server, workload) if row.server != "quire" else []
            ratio = f"{sorted(ratios)[len(ratios) // 2]:.2f}×" if ratios else ""
            shown.add_row(
                str(workload) if row is together[0] else "",
                row.server,
                f"{row.total_tokens_per_second:,.0f}",
                f"{row.spread[0]:,.0f}–{row.spread[1]:,.0f}" if row.runs > 1 else "",
                f"{row.total_tokens_per_second / floor:.0%}" if (floor := floors.get(str(row.workload))) else "",
                f"{row.output_tokens_per_second:,.0f}",
                *(_milliseconds(value) for value in (row.ttft_seconds, row.itl_seconds, row.tpot_seconds)),
                "" if row.start_seconds is None else f"{row.start_seconds:.1f}",
                "" if row.peak_rss_bytes is None else f"{row.peak_rss_bytes / 2**20:,.0f}",
                ratio,
                end_section=row is together[-1],
            )
    return shown


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:,.1f}"


def _goals(verdicts: Sequence[Verdict]) -> Table:
    shown = Table(title="Goals", title_justify="left", show_edge=False)
    shown.add_column("")
    shown.add_column("found", justify="right")
    shown.add_column("goal", justify="right")
    shown.add_column("")
    for verdict in verdicts:
        sign = "≥" if verdict.at_least else "≤"
        mark = "[green]met[/green]" if verdict.met else "[red]missed[/red]"
        shown.add_row(verdict.what, f"{verdict.found:.2f}", f"{sign} {verdict.goal:g}", mark)
    return shown


def limit_lines(limits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of each run's measurement of the machine."""
    lines = []
    for number, limit in enumerate(limits, 1):
        lines.append(
            f"machine, run {number}: arithmetic at {limit['cpu_level']} {limit['arithmetic_flops'] / 1e9:,.0f} GFLOP/s;"
            f" memory {limit['memory_bytes_per_second'] / 1e9:.0f} GB/s"
        )
        for floor in limit["floors"]:
            whole = floor["prompt_seconds"] + floor["decode_seconds"]
            lines.append(
                f"  floor of {floor['workload']}: {floor['total_tokens_per_second']:,.0f} tokens/s"
                f" (prompts {floor['prompt_seconds'] / whole:.0%}, decoding {floor['decode_seconds'] / whole:.0%})"
            )
    return lines
