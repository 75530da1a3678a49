"""``quire explain``: the command line, and the loop of --watch. ``explain_sources`` reads, ``explain_view`` draws."""

import asyncio
import os
from datetime import datetime
from typing import Annotated

import msgspec
import typer

from quire_cli.inspection import explain_view as view
from quire_cli.inspection.explain_sources import Source, source_of
from quire_cli.inspection.explanation import Explanation, Notice
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
from quire_cli.inspection.where import Where
from quire_operator.domain.autoscaling.ticks import Log
from quire_operator.ports import ClusterError

_POLL_SECONDS = 1.0


def explain(
    name: Annotated[str | None, typer.Argument(help="The LLMDeployment (default: the only one).")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object, or with --watch one line per change.")
    ] = False,
    last: Annotated[int, typer.Option(help="Number of history rows to show.", min=1)] = 10,
    namespace: NamespaceOption = None,
    kubeconfig: KubeconfigOption = None,
    context: ContextOption = None,
    local: LocalOption = False,
    run: RunOption = None,
    operator_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            parser=url,
            help="Read from the operator at this address, such as a forwarded port (default: use the API server).",
            rich_help_panel=PLACE,
        ),
    ] = None,
) -> None:
    """Explain the number of replicas of an LLMDeployment: the last decisions, each with its figures.

    Shows the demand per signal and the limiting signal, the windows and limits in effect, and the source and age of the
    figures; then the history. Uses the live run of quire up on this machine that serves the name, else the cluster that
    kubectl would use. With rollout.strategy Canary, it also compares both revisions at equal load.

      quire explain chat

      quire explain chat --watch

      quire explain chat -n prod --context gpu-cluster

      quire explain chat --json | jq .now.terms
    """
    where = Where(
        namespace=namespace,
        kubeconfig=kubeconfig,
        context=context,
        local=local,
        run=run,
        cluster=operator_url is not None,
    )
    until_interrupted(_explain(name, where, operator_url, watch=watch, as_json=as_json, last=last))


async def _explain(
    name: str | None, where: Where, operator_url: str | None, *, watch: bool, as_json: bool, last: int
) -> None:
    source = await source_of(name, where, os.environ, operator_url=operator_url)
    try:
        explained = await source.poll(now().timestamp())
        console = plain_console()
        if not watch:
            if as_json:
                _print_json(explained)
            else:
                console.print(view.render(explained, now=now(), last=last))
        elif as_json:
            await _watch_json(source, explained)
        elif console.is_terminal:
            with Redrawn(console) as screen:
                await _watch_screen(source, explained, screen, last)
        else:
            await _watch_lines(source, explained)
    finally:
        await source.close()


async def _watch_screen(source: Source, explained: Explanation, screen: Redrawn, last: int) -> None:
    while True:
        screen.render(view.render(explained, now=now(), last=last))
        await asyncio.sleep(_POLL_SECONDS)
        explained = await _refresh(source, explained, now())


async def _watch_json(source: Source, explained: Explanation) -> None:
    before = None
    while True:
        if explained != before:
            _print_json(explained)
            before = explained
        await asyncio.sleep(_POLL_SECONDS)
        explained = await _refresh(source, explained, now())


async def _watch_lines(source: Source, explained: Explanation) -> None:
    seen: Log = ()
    while True:
        for stretch in view.fresh_stretches(seen, explained.history):
            print(view.line(explained, stretch), flush=True)
        seen = explained.history or seen
        if explained.ended is not None:
            print(f"{explained.name}: the run {explained.ended}", flush=True)
            return
        await asyncio.sleep(_POLL_SECONDS)
        explained = await _refresh(source, explained, now())


async def _refresh(source: Source, explained: Explanation, time: datetime) -> Explanation:
    """Poll again; while the API server is unreachable, return the last result with a notice."""
    try:
        return await source.poll(time.timestamp())
    except ClusterError as error:
        notice = Notice(subject="API server", reason=type(error).__name__, message=str(error))
        others = tuple(each for each in explained.notices if each.subject != notice.subject)
        return msgspec.structs.replace(explained, notices=(*others, notice))


def _print_json(explained: Explanation) -> None:
    print(msgspec.json.encode(explained).decode(), flush=True)
