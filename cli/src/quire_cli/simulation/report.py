"""The report of a simulation: tables, a JSON file, a plot of everything over time."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire_cli.simulation.run import DecisionPoint, RequestResult, SimulatedRun, is_late
from quire_cli.simulation.summary import Distribution, Summary


def render(summary: Summary, run: SimulatedRun, *, title: str, slo_seconds: float, decisions: int) -> RenderableType:
    """Return the figures, the percentiles, and the last ``decisions`` changes with their reasons."""
    parts: list[RenderableType] = [_figures(summary, title, slo_seconds), Text(), _percentiles(summary)]
    changes = [decision for decision in run.decisions if decision.desired != decision.current]
    if decisions and changes:
        parts += [Text(), _changes(changes[-decisions:], len(changes))]
    elif decisions:
        parts += [Text(), Text(_why_none(run))]
    return Group(*parts)


def _figures(summary: Summary, title: str, slo_seconds: float) -> Table:
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    slo = f"first token at most {slo_seconds:g} s after the end of an immediate prefill"
    rows = [
        ("in time", f"{summary.attainment:.2%} of {summary.requests:,} requests: {slo}"),
        (
            "replica-hours",
            f"{summary.replica_hours:.2f} in {summary.hours:.2f} h: {summary.mean_replicas:.1f} replicas on average, "
            f"{summary.most_replicas} at most",
        ),
        ("changes", f"{summary.changes}, {summary.changes_per_hour:.1f} per hour"),
        ("worst queue", f"{summary.worst_queue:,} requests waiting"),
    ]
    if summary.failed:
        rows.append(
            (
                "failed",
                f"{summary.failed:,}: too long, rejected by full queues, held too long, or lost with their replica",
            )
        )
    if summary.unfinished:
        rows.append(("unfinished", f"{summary.unfinished:,} when the simulation ended"))
    if summary.preemptions:
        rows.append(("preemptions", f"{summary.preemptions:,}"))
    if summary.cached_share:
        rows.append(("prefix cache", f"{summary.cached_share:.1%} of the prompt tokens were cached"))
    for name, text in rows:
        table.add_row(name, text)
    return table


def _percentiles(summary: Summary) -> Table:
    table = Table()
    table.add_column("seconds")
    for column in ("mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(column, justify="right")
    table.add_row("time to first token", *_cells(summary.ttft_seconds))
    table.add_row("of it after an immediate prefill", *_cells(summary.wait_seconds))
    return table


def _cells(values: Distribution | None) -> list[str]:
    return ["–"] * 6 if values is None else [f"{value:,.2f}" for value in asdict(values).values()]


def _changes(changes: Sequence[DecisionPoint], total: int) -> Table:
    shown = f"last {len(changes)} of {total} changes" if len(changes) < total else f"all {total} changes"
    table = Table(title=shown, title_justify="left")
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("replicas", no_wrap=True)
    table.add_column("reason")
    for change in changes:
        table.add_row(clock(change.time), f"{change.current} → {change.desired}", change.message)
    return table


def _why_none(run: SimulatedRun) -> str:
    last = run.decisions[-1] if run.decisions else None
    return "no change" if last is None else f"no change; at the end: {last.message}"


def clock(seconds: float) -> str:
    """Return a time as 1:02:03 or 2:03."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def write_json(
    path: Path, *, arguments: Mapping[str, str], engine: Mapping[str, Any], summary: Summary, run: SimulatedRun
) -> None:
    """Write all results; times are seconds from the start of the used part of the trace.

    Prompts that cost nothing have an infinite speed, which JSON does not have: it is null.
    """
    document = {
        "arguments": arguments,
        "engine": engine,
        "summary": asdict(summary),
        "decisions": [asdict(decision) for decision in run.decisions],
        "timeline": [asdict(point) for point in run.timeline],
        "requests": [asdict(request) for request in run.requests],
    }
    path.write_text(json.dumps(_finite(document), allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: object) -> object:
    """Return the value with None in place of infinity and NaN."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def write_plot(path: Path, run: SimulatedRun, *, title: str, slo_seconds: float) -> None:
    """Arrivals, replicas, queue, KV use and late requests over the same time."""
    from matplotlib.figure import Figure  # slow to import, and only this needs it

    figure = Figure(figsize=(11, 12), layout="constrained")
    load, count, queue, cache, late = figure.subplots(5, 1, sharex=True)
    figure.suptitle(title)
    times = [point.time for point in run.timeline]
    width = max(1.0, run.scored_until / 150)
    starts, arrived = _binned(run.requests, width, lambda request: True)
    _, slow = _binned(run.requests, width, lambda request: is_late(request, slo_seconds=slo_seconds))

    load.bar(starts, [number / width for number in arrived], width=width, align="edge", color="tab:gray")
    load.set(ylabel="arrivals per second")
    count.step(times, [point.asked for point in run.timeline], where="post", linestyle="--", label="asked for")
    count.step(times, [point.ready for point in run.timeline], where="post", label="ready")
    count.set(ylabel="replicas", ylim=(0, None))
    count.legend(loc="upper left")
    queue.plot(times, [point.waiting + point.held for point in run.timeline], label="waiting", color="tab:red")
    queue.plot(times, [point.running for point in run.timeline], label="running", alpha=0.6)
    queue.set(ylabel="requests", ylim=(0, None))
    queue.legend(loc="upper left")
    cache.plot(times, [point.kv_usage * 100 for point in run.timeline], color="tab:purple")
    cache.set(ylabel="KV cache in use (%)", ylim=(0, 100))
    share = [100 * number / total if total else 0.0 for number, total in zip(slow, arrived, strict=True)]
    late.bar(starts, share, width=width, align="edge", color="tab:orange")
    late.set(ylabel="late, of those that arrived (%)", ylim=(0, 100), xlabel="seconds")
    if run.scored_from > 0:
        for axes in (load, count, queue, cache, late):
            axes.axvspan(0, run.scored_from, color="black", alpha=0.06)
    figure.savefig(path, dpi=110)


def _binned(
    requests: Sequence[RequestResult], width: float, counts: Callable[[RequestResult], bool]
) -> tuple[list[float], list[int]]:
    bins = [0] * (int(max((request.arrival for request in requests), default=0.0) / width) + 1)
    for request in requests:
        bins[int(request.arrival / width)] += counts(request)
    return [place * width for place in range(len(bins))], bins
