"""Draw a timeline: requests as bars by replica, time to first token, replicas, other figures.

Failures are red in every panel. Actions are written at the top at vertical lines. No value is smoothed or omitted. All
panels share one time axis, and values start at zero.
"""

import heapq
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from e2e_support.timeline.model import Steps, Timeline
from e2e_support.traffic.result import Mark, Record


def lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Return the lowest free lane for each span, in order of their starts."""
    free: list[int] = []
    taken: list[tuple[float, int]] = []
    placed, count = [], 0
    for start, end in spans:
        while taken and taken[0][0] <= start:
            heapq.heappush(free, heapq.heappop(taken)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane, count = count, count + 1
        heapq.heappush(taken, (end, lane))
        placed.append(lane)
    return placed


def rows_of(spans: Sequence[tuple[float, float]], *, apart: float) -> list[int]:
    """Return the lowest row for each span in which no other span is closer than `apart`."""
    rows: list[list[tuple[float, float]]] = []
    placed = []
    for start, end in spans:
        row = next(
            (number for number, row in enumerate(rows) if all(start - b >= apart or a - end >= apart for a, b in row)),
            len(rows),
        )
        if row == len(rows):
            rows.append([])
        rows[row].append((start, end))
        placed.append(row)
    return placed


WIDTH_INCHES: Final = 11.0
DPI: Final = 110
FAILED: Final = "#d62728"
COLOURS: Final = ("#1f77b4", "#2ca02c", "#9467bd", "#8c564b", "#17becf", "#bcbd22", "#7f7f7f", "#e377c2")
"""Colours of replicas, without red."""
NOBODY: Final = "#bbbbbb"
UNSEEN: Final = "#eeeeee"
_ROW_POINTS: Final = 13.0


def draw(timeline: Timeline, path: Path) -> None:
    """Draw as PNG or SVG, depending on the path's suffix."""
    figure_of(timeline).savefig(path)


def figure_of(timeline: Timeline) -> Figure:
    heights = [3.4, 1.5]
    panels = [_draw_requests, _draw_first_tokens]
    if timeline.replicas:
        panels.append(_draw_replicas)
        heights.append(1.3)
    figure = Figure(figsize=(WIDTH_INCHES, sum(heights) + 1.2), dpi=DPI)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    colours = _colours(timeline.records)
    for axis, panel in zip(axes, panels, strict=True):
        panel(axis, timeline, colours)
    for axis in axes:
        _draw_common(axis, timeline)
    axes[-1].set_xlabel("seconds since the traffic began")
    axes[-1].set_xlim(0, max(timeline.seconds, 1.0))
    figure.align_ylabels(axes)
    figure.subplots_adjust(left=0.075, right=0.985, hspace=0.12)
    _name_marks(figure, axes[0], timeline)
    return figure


def _colours(records: Sequence[Record]) -> dict[str, str]:
    """Return a colour for each replica in the order of their first answers."""
    names = dict.fromkeys(record.replica for record in sorted(records, key=lambda one: one.ended) if record.replica)
    return {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}


def _draw_requests(axis: Axes, timeline: Timeline, colours: Mapping[str, str]) -> None:
    """Draw each request as a thin bar from start to end, pale until its first token."""
    records = timeline.records
    # Lane 1 at the bottom: the highest that is taken is how many are under way.
    numbers = [1 + lane for lane in lanes([(record.started, record.ended) for record in records])]
    placed = list(zip(records, numbers, strict=True))
    waits = [[(one.started, lane), (one.first_chunk or one.ended, lane)] for one, lane in placed]
    bars = [[(one.first_chunk or one.ended, lane), (one.ended, lane)] for one, lane in placed]
    count = max(numbers, default=1)
    width = max(0.8, min(5.0, 150.0 / count))
    shades = [colours.get(one.replica or "", NOBODY) for one, _ in placed]
    axis.add_collection(LineCollection(waits, colors=shades, linewidths=width, alpha=0.35, capstyle="butt"))
    axis.add_collection(LineCollection(bars, colors=shades, linewidths=width, capstyle="butt"))
    failed = [(one, lane) for one, lane in placed if not one.ok]
    axis.add_collection(
        LineCollection(
            [[(one.started, lane), (one.ended, lane)] for one, lane in failed], colors=FAILED, linewidths=width
        )
    )
    axis.plot([one.ended for one, _ in failed], [lane for _, lane in failed], "x", color=FAILED, markersize=6)
    axis.set_ylim(0, count + 1)
    axis.set_ylabel("requests under way")
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    _legend_replicas(axis, timeline, colours)


def _legend_replicas(axis: Axes, timeline: Timeline, colours: Mapping[str, str]) -> None:
    served = {name: sum(one.replica == name for one in timeline.records) for name in colours}
    entries = [
        Line2D([], [], color=colour, linewidth=4, label=f"{_short(name)} ({served[name]})")
        for name, colour in colours.items()
    ]
    entries.append(Line2D([], [], color=NOBODY, linewidth=4, label="before its first token"))
    if timeline.blind:
        entries.append(Line2D([], [], color=UNSEEN, linewidth=8, label="the cluster gave no answer to who looked"))
    if failed := sum(not one.ok for one in timeline.records):
        entries.append(Line2D([], [], color=FAILED, marker="x", linewidth=4, label=f"failed ({failed})"))
    # Below all panels, where nothing is.
    figure = axis.figure
    assert isinstance(figure, Figure)
    figure.legend(handles=entries, loc="lower center", ncols=min(4, len(entries) or 1), fontsize=8, frameon=False)


def _draw_first_tokens(axis: Axes, timeline: Timeline, colours: Mapping[str, str]) -> None:
    streams = [one for one in timeline.records if one.ttft_seconds is not None]
    axis.scatter(
        [one.started for one in streams],
        [one.ttft_seconds or 0.0 for one in streams],
        s=9,
        color=[colours.get(one.replica or "", NOBODY) if one.ok else FAILED for one in streams],
        linewidths=0,
        clip_on=False,  # nor half a dot at the beginning
    )
    axis.set_ylabel("first token\nafter (s)")
    axis.set_ylim(0, 1.1 * max((one.ttft_seconds or 0.0 for one in streams), default=1.0) or 1.0)


def _draw_replicas(axis: Axes, timeline: Timeline, colours: Mapping[str, str]) -> None:
    styles = ("-", "--")
    highest = 1.0
    for steps in timeline.replicas:
        times, values = _stairs(steps, timeline.seconds)
        is_desired = steps.name.endswith("desired")
        colour = "black" if is_desired else "#ff7f0e"
        axis.step(times, values, where="post", linestyle=styles[is_desired], color=colour, label=steps.name)
        highest = max([highest, *values])
    axis.set_ylim(0, 1.3 * highest + 0.5)  # with room for the legend
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("replicas")
    axis.legend(loc="upper left", fontsize=8, ncols=4, framealpha=0.85)


def _stairs(steps: Steps, end: float) -> tuple[list[float], list[float]]:
    """Return step points, with the last value extended to the end."""
    times = [at for at, _ in steps.points]
    values = [value for _, value in steps.points]
    return ([*times, max(end, times[-1])], [*values, values[-1]]) if times else ([], [])


def _draw_common(axis: Axes, timeline: Timeline) -> None:
    for mark in timeline.marks:
        axis.axvline(mark.seconds, color="black", linewidth=0.8, linestyle=":")
    for blind in timeline.blind:
        axis.axvspan(blind.start, blind.end, color=UNSEEN, zorder=0, linewidth=0)
    axis.grid(axis="y", color="#e5e5e5", linewidth=0.6)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _name_marks(figure: Figure, axis: Axes, timeline: Timeline) -> None:
    """Write the names of actions above the first panel, in as many rows as necessary, and the title above them."""
    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    renderer: Any = canvas.get_renderer()  # type: ignore[no-untyped-call]
    figure.subplots_adjust(top=0.9)
    texts = [_text(axis, mark, side="left") for mark in timeline.marks]
    spans = [(box.x0, box.x1) for box in (text.get_window_extent(renderer) for text in texts)]
    for number, (start, end) in enumerate(spans):
        # A name that would leave the picture ends at its line instead.
        if end > figure.bbox.x1 - 4:
            texts[number].remove()
            texts[number] = _text(axis, timeline.marks[number], side="right")
            spans[number] = (2 * start - end, start)
    rows = rows_of(spans, apart=6.0)
    for text, row in zip(texts, rows, strict=True):
        text.xyann = (0, 4 + row * _ROW_POINTS)
    rows_points = _ROW_POINTS * (max(rows, default=-1) + 1)
    height = figure.get_figheight() * 72
    figure.subplots_adjust(top=1 - (rows_points + 30) / height, bottom=_bottom(figure) / height)
    figure.text(0.075, 1 - 8 / height, timeline.title, fontsize=12, fontweight="bold", va="top")


def _bottom(figure: Figure) -> float:
    """Return the height in points of the axis label and the legend."""
    legend = figure.legends[0]
    lines = -(-len(legend.get_texts()) // 4)
    return 40.0 + 14.0 * lines


def _text(axis: Axes, mark: Mark, *, side: Literal["left", "right"]) -> Any:
    return axis.annotate(
        mark.name,
        xy=(mark.seconds, 1),
        xycoords=("data", "axes fraction"),
        xytext=(0, 4),
        textcoords="offset points",
        fontsize=8,
        horizontalalignment=side,
        annotation_clip=False,
        bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none"},
        arrowprops={
            "arrowstyle": "-",
            "linestyle": ":",
            "linewidth": 0.8,
            "shrinkA": 0,
            "shrinkB": 0,
            "relpos": (1 if side == "right" else 0, 0),
        },
    )


def _short(replica: str) -> str:
    """Return the name of a pod without its namespace."""
    return replica.rpartition("/")[2]
