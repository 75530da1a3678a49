"""The results of all turns: medians, and ratios of quire to its peers."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from benchmarks.serving.comparison.client import Workload

Family = Literal["quire", "quire-int8", "vllm", "llama.cpp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One workload in one turn. A latency without streaming has no value."""

    workload: Workload
    requests: int
    seconds: float
    total_tokens_per_second: float
    output_tokens_per_second: float
    ttft_p50_seconds: float | None = None
    itl_p50_seconds: float | None = None
    tpot_p50_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One server in one run: started, measured, stopped. ``problem`` is the reason if it was not."""

    server: str
    family: Family
    run: int
    start_seconds: float | None
    peak_rss_bytes: int | None
    measured: tuple[Measured, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Medians of one server on one workload over the runs."""

    server: str
    family: Family
    workload: Workload
    runs: int
    total_tokens_per_second: float
    spread: tuple[float, float]
    """The minimum and maximum total tokens per second of a run."""
    output_tokens_per_second: float
    ttft_seconds: float | None
    itl_seconds: float | None
    tpot_seconds: float | None
    start_seconds: float | None
    peak_rss_bytes: float | None


def rows(turns: Sequence[Turn]) -> list[Row]:
    """Return the rows in the order in which servers and workloads first occurred."""
    found: dict[tuple[str, Workload], list[tuple[Turn, Measured]]] = {}
    for turn in turns:
        for measured in turn.measured:
            found.setdefault((turn.server, measured.workload), []).append((turn, measured))
    return [_row(together) for together in found.values()]


def _row(together: Sequence[tuple[Turn, Measured]]) -> Row:
    turn, first = together[0]

    def median(value: Callable[[Turn, Measured], float | None]) -> float | None:
        values = [found for each in together if (found := value(*each)) is not None]
        return statistics.median(values) if values else None

    totals = [measured.total_tokens_per_second for _, measured in together]
    return Row(
        server=turn.server,
        family=turn.family,
        workload=first.workload,
        runs=len(together),
        total_tokens_per_second=statistics.median(totals),
        spread=(min(totals), max(totals)),
        output_tokens_per_second=statistics.median(m.output_tokens_per_second for _, m in together),
        ttft_seconds=median(lambda _, m: m.ttft_p50_seconds),
        itl_seconds=median(lambda _, m: m.itl_p50_seconds),
        tpot_seconds=median(lambda _, m: m.tpot_p50_seconds),
        start_seconds=median(lambda t, _: t.start_seconds),
        peak_rss_bytes=median(lambda t, _: t.peak_rss_bytes),
    )


def run_ratios(turns: Sequence[Turn], ours: str, theirs: str, workload: Workload) -> list[float]:
    """Return the total tokens per second of ``ours`` over ``theirs`` in each run.

    The two are neighbours in time, so other load on the machine affects both.
    """
    by_run: dict[int, dict[str, float]] = {}
    for turn in turns:
        for measured in turn.measured:
            if measured.workload == workload:
                by_run.setdefault(turn.run, {})[turn.server] = measured.total_tokens_per_second
    return [both[ours] / both[theirs] for both in by_run.values() if ours in both and theirs in both and both[theirs]]


def as_document(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return plain values for JSON, with workloads as they are written on the command line."""
    return [
        asdict(turn) | {"measured": [asdict(m) | {"workload": str(m.workload)} for m in turn.measured]}
        for turn in turns
    ]


# --- the report ---


def show(console: Console, turns: Sequence[Turn], *, title: str) -> None:
    table = rows(turns)
    console.print(_medians(turns, table, title))
    for turn in turns:
        if turn.problem is not None:
            console.print(f"{turn.server}, run {turn.run}: {turn.problem}", style="red", markup=False, highlight=False)


def _medians(turns: Sequence[Turn], table: Sequence[Row], title: str) -> Table:
    shown = Table(title=title, title_justify="left", show_edge=False)
    shown.add_column("in/out@at a time")
    shown.add_column("server")
    columns = ("total tok/s", "least–most", "out tok/s", "TTFT ms", "ITL ms", "TPOT ms", "start s", "peak MiB")
    for column in (*columns, "quire is"):
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
