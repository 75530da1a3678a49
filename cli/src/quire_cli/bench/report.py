"""The report of a benchmark: a table, a JSON file, a plot."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from rich.table import Table

from quire_cli.bench.summary import BenchSummary, Distribution, MeasuredRequest


def table(summary: BenchSummary, title: str) -> Table:
    """Return the table of latencies."""
    result = Table(title=title, title_justify="left", show_header=True, header_style="bold")
    result.add_column("")
    for column in ("mean", "p50", "p90", "p95", "p99", "max"):
        result.add_column(column, justify="right")
    rows = (
        ("time to first token (ms)", summary.ttft_seconds),
        ("inter-token latency (ms)", summary.itl_seconds),
        ("time per output token (ms)", summary.tpot_seconds),
        ("end to end (ms)", summary.e2e_seconds),
    )
    for name, values in rows:
        result.add_row(name, *_cells(values))
    return result


def _cells(values: Distribution | None) -> list[str]:
    return ["–"] * 6 if values is None else [f"{value * 1000:,.1f}" for value in asdict(values).values()]


def lines(summary: BenchSummary) -> list[str]:
    """Return the figures that are not percentiles."""
    result = [
        f"requests    {summary.succeeded} of {summary.requests} answered in {summary.duration_seconds:.1f} s"
        f" ({summary.requests_per_second:.2f}/s)",
        f"tokens      {summary.prompt_tokens:,} in, {summary.output_tokens:,} out:"
        f" {summary.output_tokens_per_second:,.0f} out/s, {summary.total_tokens_per_second:,.0f} total/s",
    ]
    if summary.goodput_requests_per_second is not None:
        result.append(f"goodput     {summary.goodput_requests_per_second:.2f} requests/s within the objective")
    if summary.short:
        result.append(f"short       {summary.short} answers ended before the requested length")
    result += [f"error       {count} x {message}" for message, count in summary.errors.items()]
    return result


def write_json(
    path: Path,
    arguments: dict[str, Any],
    started_at: datetime,
    summary: BenchSummary,
    outcomes: Sequence[MeasuredRequest],
) -> None:
    """Write all measurements; times of requests are seconds after ``started_at``."""
    document = {
        "arguments": arguments,
        "started_at": started_at.isoformat(),
        "summary": asdict(summary),
        "requests": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def write_plot(path: Path, title: str, outcomes: Sequence[MeasuredRequest]) -> None:
    """Write three panels: load and throughput over time, time to first token over time, latency distributions."""
    from matplotlib.figure import Figure  # slow to import, and only this needs it

    figure = Figure(figsize=(11, 9), layout="constrained")
    load, first, spread = figure.subplots(3, 1)
    figure.suptitle(title)
    good = [outcome for outcome in outcomes if outcome.error is None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    seconds = range(int(max((outcome.end_seconds for outcome in outcomes), default=0)) + 1)

    load.step(seconds, _running(outcomes, len(seconds)), where="post")
    load.set(ylabel="running requests", xlabel="seconds", ylim=(0, None))
    rate = load.twinx()
    finished = [0] * len(seconds)
    for outcome in good:
        finished[int(outcome.end_seconds)] += outcome.output_tokens
    rate.step(seconds, finished, where="post", color="tab:orange", alpha=0.6)
    rate.set(ylabel="output tokens of finished requests (per s)", ylim=(0, None))

    timed = [(o.sent_seconds, o.ttft_seconds) for o in good if o.ttft_seconds is not None]
    first.plot([at for at, _ in timed], [value for _, value in timed], ".", markersize=4, label="answered")
    if failed:
        first.plot([o.sent_seconds for o in failed], [0.0] * len(failed), "rx", label="failed")
        first.legend()
    first.set(ylabel="time to first token (s)", xlabel="sent at (s)", ylim=(0, None))

    columns = {
        "TTFT": [o.ttft_seconds for o in good if o.ttft_seconds is not None],
        "ITL": [gap for o in good for gap in o.chunk_gaps_seconds],
        "TPOT": [o.tpot_seconds for o in good if o.tpot_seconds is not None],
        "E2E": [o.e2e_seconds for o in good],
    }
    for name, values in columns.items():
        ordered = sorted(value for value in values if value > 0)
        if ordered:
            spread.plot(
                [v * 1000 for v in ordered], [(i + 1) / len(ordered) * 100 for i in range(len(ordered))], label=name
            )
            spread.legend()
    spread.set(xscale="log", xlabel="milliseconds", ylabel="% of values at or below", ylim=(0, 100))
    figure.savefig(path, dpi=120)


def _running(outcomes: Sequence[MeasuredRequest], seconds: int) -> list[int]:
    """Return the number of requests in each second; a request counts in every second that it touches."""
    changes = [0] * (seconds + 1)
    for outcome in outcomes:
        changes[int(outcome.sent_seconds)] += 1
        changes[int(outcome.end_seconds) + 1] -= 1
    return list(accumulate(changes))[:seconds]
