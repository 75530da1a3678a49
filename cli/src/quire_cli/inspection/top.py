"""``quire top``: the command line and the loop. ``top_sources`` polls, ``fleet`` computes, ``top_view`` renders."""

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
"""The shortest period of rates: a percentile over the first tokens of one second means little."""
_LEAST_INTERVAL = 0.2
_OTHER_LINES = 14
"""Lines of the screen that are not rows."""


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
        bool, typer.Option("--all-namespaces", "-A", help="Show all namespaces of the cluster.", rich_help_panel=PLACE)
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
            help="Read metrics from this Prometheus (default: scrape the replicas).",
            rich_help_panel=PLACE,
        ),
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
            run_loop = _loop(once=once, replicas=replicas, as_json=as_json)
            await run_loop(source, Loads(seconds=max(_RATE_SECONDS, interval)), interval, sort)
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


def _loop(*, once: bool, replicas: bool, as_json: bool) -> _Show:
    console = plain_console()

    def show(load: FleetLoad) -> None:
        if as_json:
            print(msgspec.json.encode(load).decode(), flush=True)
        else:
            console.print(view.render(load, width=console.width, expand=replicas, most_rows=None))

    async def snapshot(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        loads.update(await source.poll(now().timestamp()), sort=sort)
        await asyncio.sleep(interval)
        show(loads.update(await source.poll(now().timestamp()), sort=sort))

    async def lines(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        await _poll_forever(source, loads, interval, sort, show)

    async def screen(source: Source, loads: Loads, interval: float, sort: Sort) -> None:
        with Redrawn(console) as drawn:

            def show(load: FleetLoad) -> None:
                height, width = _most_rows(console), console.width
                drawn.render(view.render(load, width=width, expand=replicas, most_rows=height))

            await _poll_forever(source, loads, interval, sort, show)

    if once:
        return snapshot
    return screen if console.is_terminal and not as_json else lines


def _most_rows(console: Console) -> int:
    return console.size.height - _OTHER_LINES


async def _poll_forever(
    source: Source, loads: Loads, interval: float, sort: Sort, show: Callable[[FleetLoad], None]
) -> None:
    """Poll until interrupted. A poll that takes longer than the interval is followed by the next one at once."""
    loop = asyncio.get_running_loop()
    fleet: Fleet | None = None
    while True:
        started = loop.time()
        try:
            fleet = await source.poll(now().timestamp())
        except ClusterError as error:
            assert fleet is not None, "errors of the first poll are user errors"
            fleet = replace(fleet, note=f"the API server: {error}")
        show(loads.update(fleet, sort=sort))
        await asyncio.sleep(max(0.0, interval - (loop.time() - started)))
