"""Plots of the rows: attainment against hours by row, and one case's timeline under every policy."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.autoscaling.matrix import ORACLE, Row
from benchmarks.autoscaling.registry import PEERS
from benchmarks.report import new_figure, save_figure
from quire_cli.simulation.results import SimulatedRun, is_late

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"quire": "C3", "hpa": "C0", "kpa": "C1", "keda": "C2", "llmd": "C4", ORACLE: "0.5"}
MARKERS = {0.95: "o", 0.99: "s"}
_BIN_SECONDS = 30.0


def plot_rows(path: Path, rows: Sequence[Row]) -> None:
    """Plot each policy's late share against its hours as a multiple of hindsight static.

    There is a panel for each trace and target.
    """
    traces = list(dict.fromkeys(row.case.load.name for row in rows))
    targets = sorted({row.target for row in rows})
    figure = new_figure(width=5.5 * len(traces), height=4.2 * len(targets))
    axes = figure.subplots(len(targets), len(traces), squeeze=False)
    for line, target in enumerate(targets):
        for place, trace in enumerate(traces):
            ax = axes[line][place]
            there = [row for row in rows if row.target == target and row.case.load.name == trace]
            for name in ("quire", *PEERS, ORACLE):
                ax.scatter(
                    [row.scores[name].replica_hours / row.scores[ORACLE].replica_hours for row in there],
                    [100 * max(row.scores[name].late, 1e-4) for row in there],
                    color=COLOURS[name],
                    marker="x" if name == ORACLE else "o",
                    s=22,
                    label=name,
                )
            ax.axhline(100 * (1 - target), color="0.6", linestyle="--", linewidth=1)
            ax.set_yscale("log")
            ax.set_title(f"{trace}, {target:.0%} in time", fontsize=10)
            ax.set_xlabel("replica-hours / hindsight static")
            ax.set_ylabel("late answers, %")
    axes[0][0].legend(fontsize=8)
    figure.suptitle("A point is one start-up delay and fault, mean over seeds; below the dashed line the target is met")
    save_figure(path, figure)


def plot_timeline(path: Path, title: str, runs: Mapping[str, SimulatedRun]) -> None:
    """Plot arrivals on top; then requested and ready replicas, and late answers, policy by policy."""
    figure = new_figure(width=12, height=2.0 * (len(runs) + 1))
    axes = figure.subplots(len(runs) + 1, 1, sharex=True)
    first = next(iter(runs.values()))
    bins = [0.0] * (int(first.scored_until // _BIN_SECONDS) + 1)
    for request in first.requests:
        bins[int(request.arrival // _BIN_SECONDS)] += request.prompt_tokens / _BIN_SECONDS
    axes[0].step([i * _BIN_SECONDS for i in range(len(bins))], bins, where="post", color="0.3")
    axes[0].set_ylabel("prompt tokens/s")
    axes[0].set_title(title, fontsize=11)
    for ax, (name, run) in zip(axes[1:], runs.items(), strict=True):
        _panel(ax, name, run)
    axes[-1].set_xlabel("seconds")
    save_figure(path, figure)


def _panel(ax: "Axes", name: str, run: SimulatedRun) -> None:
    times = [point.time for point in run.timeline]
    ax.step(times, [point.asked for point in run.timeline], where="post", color=COLOURS[name], label="asked for")
    ax.step(times, [point.ready for point in run.timeline], where="post", color="0.6", linewidth=0.8, label="ready")
    ax.axvspan(0, run.scored_from, color="0.95")
    late = [request.arrival for request in run.requests if is_late(request)]
    ax.eventplot(late, lineoffsets=0.5, linelengths=1.0, colors="k", linewidths=0.3)
    ax.set_ylabel(name)
    ax.set_title(
        f"{run.attainment():.2%} in time, {run.replica_hours:.2f} replica-hours, "
        f"{run.changes_per_hour:.0f} changes/h, worst queue {run.worst_queue}",
        fontsize=8,
        loc="right",
    )
