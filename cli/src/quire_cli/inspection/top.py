"""``quire top``: the command, its loop, and its table. ``replicas`` polls, ``load`` computes.

The table fits 80 columns. An unknown figure is a dash; the reason is below the table.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec
import typer
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire_cli.inspection.load import DeploymentLoad, Figures, Fleet, FleetLoad, Loads, ReplicaLoad, Sort
from quire_cli.inspection.replicas import ClusterFleet, DirectPages, PrometheusPages, ProxiedPages, RunFleet
from quire_cli.inspection.where import (
    ContextOption,
    KubeconfigOption,
    LocalOption,
    NamespaceOption,
    RunOption,
    Where,
    now,
    of_place,
    open_target,
    redrawn,
    until_interrupted,
)
from quire_cli.local.state import Run
from quire_cli.options import URL, plain_console
from quire_common.quantities import parse_duration_seconds
from quire_operator.kube.errors import ClusterError

_RATE_SECONDS = 10.0
"""The shortest period of rates: a percentile over the first tokens of one second means little."""
_LEAST_INTERVAL = 0.2
_OTHER_LINES = 14
"""Lines of the screen that are not rows."""
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


def _interval(text: str) -> float:
    seconds = parse_duration_seconds(text)
    if seconds is None or seconds < _LEAST_INTERVAL:
        raise typer.BadParameter(f'"{text}" is not a duration of at least 200ms, such as 2s')
    return seconds


def top(
    names: Annotated[list[str] | None, typer.Argument(help="LLMDeployments to show (default: all).")] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one snapshot and exit.")] = False,
    interval: Annotated[float, typer.Option(help="Refresh interval.", parser=_interval, metavar="DURATION")] = "2s",  # type: ignore[assignment]
    replicas: Annotated[bool, typer.Option("--replicas", help="Also show a row per replica.")] = False,
    sort: Annotated[Sort, typer.Option(help="Sort order.")] = Sort.queue,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per refresh, with every replica.")
    ] = False,
    namespace: NamespaceOption = None,
    all_namespaces: Annotated[
        bool, of_place("Show all namespaces of the cluster.", names=("--all-namespaces", "-A"))
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    local: LocalOption = False,
    run: RunOption = None,
    prometheus_url: Annotated[
        str | None,
        of_place("Read metrics from this Prometheus (default: scrape the replicas).", **URL),
    ] = None,
) -> None:
    """Show the current load of LLMDeployments: queue, running, KV cache usage, tokens per second, time to first token.

    Rates and percentiles cover the last ten seconds. They come from the replicas' metrics: scraped directly for a local
    run, through the API server on a cluster (requires permission to get pods/proxy), or from Prometheus. A dash is an
    unknown figure; the reason is below the table.

      quire top

      quire top -n prod --replicas --sort kv

      quire top -A --once

      quire top chat --json | jq .deployments[0].figures
    """
    where = Where(
        namespace=namespace, kubeconfig=kubeconfig, context=context, local=local, run=run, cluster=all_namespaces
    )
    wanted = tuple(names or ())

    async def work() -> None:
        source = await _source(wanted, where, prometheus_url, everywhere=all_namespaces)
        try:
            with _output(once=once, replicas=replicas, as_json=as_json) as show:
                await _poll(source, Loads(seconds=max(_RATE_SECONDS, interval)), interval, sort, show, once=once)
        finally:
            await source.close()

    until_interrupted(work())


async def _source(
    names: tuple[str, ...], where: Where, prometheus_url: str | None, *, everywhere: bool
) -> RunFleet | ClusterFleet:
    found = await open_target(where, names, os.environ)
    prometheus = None if prometheus_url is None else PrometheusPages(prometheus_url)
    if isinstance(found, Run):
        return RunFleet(found, names, prometheus or DirectPages())
    namespace = None if everywhere else where.namespace or found.namespace
    return ClusterFleet(found, namespace, names, prometheus or ProxiedPages(found))


_Show = Callable[[FleetLoad], None]


@contextmanager
def _output(*, once: bool, replicas: bool, as_json: bool) -> Iterator[_Show]:
    console = plain_console()
    if as_json:
        yield lambda load: print(msgspec.json.encode(load).decode(), flush=True)
    elif once or not console.is_terminal:
        yield lambda load: console.print(render(load, width=console.width, expand=replicas, most_rows=None))
    else:
        with redrawn(console) as screen:

            def show(load: FleetLoad) -> None:
                most_rows = console.size.height - _OTHER_LINES
                screen.update(render(load, width=console.width, expand=replicas, most_rows=most_rows), refresh=True)

            yield show


async def _poll(
    source: RunFleet | ClusterFleet, loads: Loads, interval: float, sort: Sort, show: _Show, *, once: bool
) -> None:
    """Poll until interrupted; with ``once`` poll twice, because rates need two polls, and show the second.

    A poll that takes longer than the interval is followed by the next one at once.
    """
    loop = asyncio.get_running_loop()
    fleet: Fleet | None = None
    while True:
        started, is_first = loop.time(), fleet is None
        try:
            fleet = await source.poll(now().timestamp())
        except ClusterError as error:
            assert fleet is not None, "errors of the first poll are user errors"
            fleet = replace(fleet, note=f"the API server: {error}")
        load = loads.update(fleet, sort=sort)
        if not (once and is_first):
            show(load)
            if once:
                return
        await asyncio.sleep(max(0.0, interval - (loop.time() - started)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
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
