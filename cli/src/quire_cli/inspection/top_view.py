"""A ``FleetLoad`` as a table that fits 80 columns. An unknown figure is a dash; the reason is below the table."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire_cli.inspection.fleet import DeploymentLoad, FleetLoad, ReplicaLoad
from quire_cli.inspection.load import Figures

_DASH = "–"
_COLUMNS = (
    "Ready",
    "Queue",
    "Run",
    "KV",
    "Prompt\ntok/s",
    "Gen\ntok/s",
    "TTFT\np50",
    "TTFT\np95",
    "Hits",
    "Pre-\nempt/s",
)
_MIN_NAME = 12
_ROOMY = 110
"""The width in columns from which figures get more space."""
_MOST_NOTES = 6
_PHASE_STYLE = {"Ready": "", "Loading": "yellow", "Pending": "dim", "Draining": "cyan", "Failed": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """A row of the table."""

    name: str
    style: str
    indent: int
    state: Text
    figures: Figures


def render(load: FleetLoad, *, width: int, expand: bool, most_rows: int | None) -> RenderableType:
    """Return the screen; ``most_rows`` limits its rows, None shows all."""
    rows = list(_rows(load.deployments, expand=expand))
    shown = rows if most_rows is None else rows[: max(1, most_rows)]
    parts: list[RenderableType] = [_title(load)]
    parts.append(_table(shown, width) if rows else Text("\nno LLMDeployments", "dim"))
    if len(shown) < len(rows):
        more = f"… and {len(rows) - len(shown)} more rows; enlarge the terminal, name deployments, or use --once"
        parts.append(Text(more, "dim"))
    parts += [Text(note, "dim") for note in notes(load)]
    return Group(*parts)


def _table(rows: Sequence[_Row], width: int) -> Table:
    """Return the table. Names are shortened at their start, because the ends of pod names differ; figures never are."""
    lines = [[row.state, *map(Text, _cells(row.figures))] for row in rows]
    heads = [max(map(len, name.split("\n"))) for name in _COLUMNS]
    widths = [max(head, *(line[i].cell_len for line in lines)) for i, head in enumerate(heads)]
    space = 1 if width >= _ROOMY else 0  # in addition to the box's own
    left = max(_MIN_NAME, width - sum(widths) - (1 + space) * len(widths))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, space, 0, 0), pad_edge=False, show_edge=False, expand=False)
    table.add_column("Name", no_wrap=True, vertical="bottom")
    for name, fixed in zip(_COLUMNS, widths, strict=True):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom", min_width=fixed)
    for row, line in zip(rows, lines, strict=True):
        named = Text(" " * row.indent + _shortened(row.name, left - row.indent), row.style)
        table.add_row(named, *line)
    return table


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def notes(load: FleetLoad) -> list[str]:
    """Return the reasons of unknown figures, each once with the replicas concerned."""
    silent: dict[str, list[str]] = {}
    for deployment in load.deployments:
        for replica in deployment.replicas:
            if replica.silence is not None:
                silent.setdefault(replica.silence, []).append(replica.name)
    lines = [f"{_names(names)}: {why}" for why, names in silent.items()]
    empty = [deployment.title for deployment in load.deployments if not deployment.replicas]
    lines += [f"{_names(empty)}: no replicas"] if empty else []
    reasons: dict[str, set[str]] = {}
    for deployment in load.deployments:
        if deployment.answering:
            for figure, why in deployment.figures.missing.items():
                reasons.setdefault(why, set()).add(_TITLES.get(figure, figure))
    lines += [f"{_DASH} {', '.join(sorted(figures))}: {why}" for why, figures in reasons.items()]
    more = [f"… and {len(lines) - _MOST_NOTES} more reasons; see --json"] if len(lines) > _MOST_NOTES else []
    return [*lines[:_MOST_NOTES], *more]


_TITLES = {
    "waiting": "queue",
    "running": "run",
    "kvPercent": "KV",
    "promptTokensPerSecond": "prompt tok/s",
    "generationTokensPerSecond": "gen tok/s",
    "timeToFirstTokenP50": "TTFT",
    "timeToFirstTokenP95": "TTFT",
    "prefixHitPercent": "hits",
    "preemptionsPerSecond": "preempt/s",
}


def _title(load: FleetLoad) -> Text:
    span = f"rates over {load.seconds:.0f} s" if load.seconds else "first poll, no rates yet"
    text = Text.assemble((load.place, "bold"), (f"\nreplicas {load.how}; {span}", "dim"))
    return text if load.note is None else text.append(f"\n{load.note}", "bold yellow")


def _rows(deployments: Iterable[DeploymentLoad], *, expand: bool) -> Iterator[_Row]:
    for deployment in deployments:
        asked = "?" if deployment.asked is None else str(deployment.asked)
        short = deployment.asked is not None and deployment.ready < deployment.asked
        yield _Row(
            name=deployment.title,
            style="bold",
            indent=0,
            state=Text(f"{deployment.ready}/{asked}", "yellow" if short else ""),
            figures=deployment.figures,
        )
        if expand:
            yield from map(_replica_row, deployment.replicas)


def _replica_row(replica: ReplicaLoad) -> _Row:
    style = _PHASE_STYLE.get(replica.phase, "")
    return _Row(name=replica.name, style=style, indent=2, state=Text(replica.phase, style), figures=replica.figures)


def _cells(figures: Figures) -> list[str]:
    return [
        _number(figures.waiting),
        _number(figures.running),
        _percent(figures.kv_percent),
        _number(figures.prompt_tokens_per_second),
        _number(figures.generation_tokens_per_second),
        _seconds(figures.time_to_first_token_p50),
        _seconds(figures.time_to_first_token_p95),
        _percent(figures.prefix_hit_percent),
        _small(figures.preemptions_per_second),
    ]


def _number(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{value:,.0f}" if value < 100_000 else f"{value / 1000:,.0f}k"


def _small(value: float | None) -> str:
    return _DASH if value is None else f"{value:.1f}" if 0 < value < 10 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return _DASH if value is None else f"{value:.0f}%"


def _seconds(value: float | None) -> str:
    if value is None:
        return _DASH
    return f"{1000 * value:.0f}ms" if value < 1 else f"{value:.1f}s" if value < 100 else f"{value:.0f}s"


def _names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
