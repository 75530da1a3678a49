"""Plot the throughput and latencies of a comparison, with a group of bars for each workload."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.report import new_figure, save_figure
from benchmarks.serving.comparison.results import Row, Turn, rows

_COLOURS = {
    "quire": "tab:blue",
    "quire-int8": "tab:cyan",
    "vllm": "tab:orange",
    "llama.cpp": "tab:green",
    "transformers": "tab:grey",
}
_BAR = 0.8


def write_plot(path: Path, turns: Sequence[Turn], floors: Mapping[str, float], title: str) -> None:
    """Plot the turns. ``floors`` are total tokens per second by workload, shown as lines over the groups."""
    table = rows(turns)
    figure = new_figure(title, height=9)
    top, *bottom = figure.subplot_mosaic("AAA;BCD", height_ratios=(3, 2)).values()
    _bars(top, table, lambda row: row.total_tokens_per_second, "total tokens/s", spread=True)
    for place, workload in enumerate(dict.fromkeys(str(row.workload) for row in table)):
        if workload in floors:
            top.hlines(
                floors[workload],
                place - _BAR / 2,
                place + _BAR / 2,
                colors="black",
                linestyles="dashed",
                label="floor: arithmetic and reading alone" if place == 0 else "",
            )
    # A lower bound may be above every bar.
    top.autoscale(axis="y")
    top.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", ncols=5)
    _bars(bottom[0], table, lambda row: row.ttft_seconds and row.ttft_seconds * 1e3, "median TTFT (ms)", spread=False)
    _bars(bottom[1], table, lambda row: row.itl_seconds and row.itl_seconds * 1e3, "median ITL (ms)", spread=False)
    _starts(bottom[2], table)
    save_figure(path, figure)


def _starts(axes, table: Sequence[Row]) -> None:  # type: ignore[no-untyped-def]
    """Plot one bar per server, because a server starts once for all workloads."""
    starts = {row.server: row.start_seconds for row in table if row.start_seconds is not None}
    shades = _shades(table)
    for place, (server, seconds) in enumerate(starts.items()):
        colour, alpha = shades[server]
        axes.bar(place, seconds, _BAR, color=colour, alpha=alpha)
        axes.annotate(f"{seconds:,.1f}", (place, seconds), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(starts)), list(starts), fontsize=7, rotation=20)
    axes.set(ylabel="start to first token (s)", ylim=(0, None))


def _bars(axes, table: Sequence[Row], value: Callable[[Row], float | None], name: str, *, spread: bool) -> None:  # type: ignore[no-untyped-def]
    workloads = list(dict.fromkeys(row.workload for row in table))
    names = list(dict.fromkeys(row.server for row in table))
    width = _BAR / len(names)
    shades = _shades(table)
    for number, server in enumerate(names):
        mine = [row for row in table if row.server == server and value(row) is not None]
        if not mine:
            continue
        places = [workloads.index(row.workload) - _BAR / 2 + (number + 0.5) * width for row in mine]
        heights = [value(row) or 0.0 for row in mine]
        ends = [
            [h - row.spread[0] for h, row in zip(heights, mine, strict=True)],
            [row.spread[1] - h for h, row in zip(heights, mine, strict=True)],
        ]
        colour, alpha = shades[server]
        axes.bar(
            places,
            heights,
            width * 0.92,
            label=server if spread else None,
            color=colour,
            alpha=alpha,
            yerr=ends if spread and any(map(any, ends)) else None,
            capsize=2,
        )
        if spread:
            for place, height, row in zip(places, heights, mine, strict=True):
                axes.annotate(f"{height:,.0f}", (place, row.spread[1]), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(workloads)), [str(workload) for workload in workloads], fontsize=9 if spread else 7)
    axes.set(ylabel=name, ylim=(0, None), xlim=(-0.5, len(workloads) - 0.5))


def _shades(table: Sequence[Row]) -> dict[str, tuple[str, float]]:
    """Return a colour by family, paler for each further member."""
    shades: dict[str, tuple[str, float]] = {}
    members: dict[str, int] = {}
    for row in table:
        if row.server not in shades:
            earlier = members.get(row.family, 0)
            shades[row.server] = (_COLOURS[row.family], max(0.35, 1.0 - 0.3 * earlier))
            members[row.family] = earlier + 1
    return shades
