"""``quire top``: the command line and the loop. ``top_sources`` polls, ``fleet`` computes, ``top_view`` renders."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import msgspec
import typer

from quire_cli.inspection import top_view as view
from quire_cli.inspection.fleet import Fleet, FleetLoad, Loads, Sort
from quire_cli.inspection.replica_pages import DirectPages, PrometheusPages, ProxiedPages
from quire_cli.inspection.screen import (
    ContextOption,
    KubeconfigOption,
    LocalOption,
    NamespaceOption,
    RunOption,
    now,
    of_place,
    redrawn,
    until_interrupted,
)
from quire_cli.inspection.top_sources import ClusterFleet, FleetSource, RunFleet
from quire_cli.inspection.where import Where, open_target
from quire_cli.local.state import Run
from quire_cli.options import URL, plain_console
from quire_common.quantities import parse_duration_seconds
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


async def _source(names: tuple[str, ...], where: Where, prometheus_url: str | None, *, everywhere: bool) -> FleetSource:
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
        yield lambda load: console.print(view.render(load, width=console.width, expand=replicas, most_rows=None))
    else:
        with redrawn(console) as screen:

            def show(load: FleetLoad) -> None:
                most_rows = console.size.height - _OTHER_LINES
                screen.update(
                    view.render(load, width=console.width, expand=replicas, most_rows=most_rows), refresh=True
                )

            yield show


async def _poll(source: FleetSource, loads: Loads, interval: float, sort: Sort, show: _Show, *, once: bool) -> None:
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
