"""``quire top``: the command line and the loop. ``top_sources`` looks, ``domain.fleet`` reckons, ``top_view`` draws."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from quire_cli.inspection import top_view as view
from quire_cli.inspection.fleet import Fleet, FleetLoad, Loads, Sort
from quire_cli.inspection.replica_pages import DirectPages, Pages, PrometheusPages, ProxiedPages
from quire_cli.inspection.screen import (
    PLACE,
    ContextOption,
    KubeconfigOption,
    LocalOption,
    NamespaceOption,
    Redrawn,
    RunOption,
    now,
    plain_console,
    until_interrupted,
    url,
)
from quire_cli.inspection.top_sources import ClusterFleet, RunFleet, Source
from quire_cli.inspection.where import Where, chosen_run, connected, ended_run, nowhere
from quire_common.quantities import parse_duration_seconds
from quire_operator.errors import ClusterProblem
from quire_operator.ports import ClusterError

_RATE_SECONDS = 10.0
"""Rates are means over at least so long: a percentile of one second's first tokens says little."""
_LEAST_INTERVAL = 0.2
_ROUND_THE_TABLE = 14
"""Lines of the screen that are no rows."""


def _interval(text: str) -> float:
    seconds = parse_duration_seconds(text)
    if seconds is None or seconds < _LEAST_INTERVAL:
        raise typer.BadParameter(f'"{text}" is not a duration of at least 200ms, such as 2s')
    return seconds


def top(
    names: Annotated[list[str] | None, typer.Argument(help="LLMDeployments; all where none is named.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Two looks, one table, and end.")] = False,
    interval: Annotated[float, typer.Option(help="From look to look.", parser=_interval, metavar="DURATION")] = "2s",  # type: ignore[assignment]
    replicas: Annotated[bool, typer.Option("--replicas", help="A row for each replica as well.")] = False,
    sort: Annotated[Sort, typer.Option(help="What comes first.")] = Sort.queue,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a line at each look, with every replica.")
    ] = False,
    namespace: NamespaceOption = None,
    all_namespaces: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="All of the cluster.", rich_help_panel=PLACE)
    ] = False,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    local: LocalOption = False,
    run: RunOption = None,
    prometheus_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            parser=url,
            help="Read the figures from this Prometheus; without it replicas are asked.",
            rich_help_panel=PLACE,
        ),
    ] = None,
) -> None:
    """Show what LLMDeployments carry now: queue, running, KV use, tokens per second, time to first token.

    Rates and percentiles are of the last ten seconds, from the replicas' own metrics: of a local run they are asked
    directly, on a cluster through the API server (the right to get pods/proxy), or Prometheus is. A dash is a figure
    that is not known; below the table stands why.

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
            show = _shower(once=once, replicas=replicas, as_json=as_json)
            await show(source, Loads(seconds=max(_RATE_SECONDS, interval)), interval, sort)
        finally:
            await source.close()

    until_interrupted(work())


async def _source(names: tuple[str, ...], where: Where, prometheus_url: str | None, *, everywhere: bool) -> Source:
    prometheus = None if prometheus_url is None else PrometheusPages(prometheus_url)
    run = chosen_run(where, names, os.environ)
    if run is None:
        try:
            reader = await connected(where)
        except ClusterProblem as error:
            run = ended_run(where, names, os.environ)
            if run is None:
                raise nowhere(error, where, names, os.environ) from error
    if run is not None:
        return RunFleet(run, names, prometheus or DirectPages())
    pages: Pages = prometheus or ProxiedPages(reader)
    return ClusterFleet(reader, None if everywhere else where.namespace or reader.namespace, names, pages)


_Show = Callable[[Source, Loads, float, Sort], Awaitable[None]]


def _shower(*, once: bool, replicas: bool, as_json: bool) -> _Show:
    console = plain_console()

    def tell(load: FleetLoad) -> None:
        if as_json:
            print(msgspec.json.encode(load).decode(), flush=True)
        else:
            console.print(view.render(load, width=console.width, expand=replicas, most_rows=None))

    async def two_looks(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        loads.update(await source.look(now().timestamp()), sort=sort)
        await asyncio.sleep(interval)
        tell(loads.update(await source.look(now().timestamp()), sort=sort))

    async def lines(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        await _for_ever(source, loads, interval, sort, tell)

    async def screen(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        with Redrawn(console) as drawn:

            def draw(load: FleetLoad) -> None:
                height, width = _most_rows(console), console.width
                drawn.draw(view.render(load, width=width, expand=replicas, most_rows=height))

            await _for_ever(source, loads, interval, sort, draw)

    if once:
        return two_looks
    return screen if console.is_terminal and not as_json else lines


def _most_rows(console: Console) -> int:
    return console.size.height - _ROUND_THE_TABLE


async def _for_ever(
    source: Source, loads: Loads, interval: float, sort: Sort, tell: Callable[[FleetLoad], None]
) -> None:
    """Until interrupted. A look that takes longer than the interval is followed by the next at once."""
    loop = asyncio.get_running_loop()
    fleet: Fleet | None = None
    while True:
        begun = loop.time()
        try:
            fleet = await source.look(now().timestamp())
        except ClusterError as error:
            assert fleet is not None, "the first look's errors are a person's"
            fleet = replace(fleet, note=f"the API server: {error}")
        tell(loads.update(fleet, sort=sort))
        await asyncio.sleep(max(0.0, interval - (loop.time() - begun)))
