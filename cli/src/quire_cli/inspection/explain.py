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

_LOOK_SECONDS = 1.0


def explain(
    name: Annotated[
        str | None, typer.Argument(help="The LLMDeployment; may be left out where there is but one.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Redraw as it changes, until Ctrl-C.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object; with --watch one a line, at each change.")
    ] = False,
    last: Annotated[int, typer.Option(help="So many rows of history.", min=1)] = 10,
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
            help="Ask the operator here, as through kubectl port-forward; else through the API server.",
            rich_help_panel=PLACE,
        ),
    ] = None,
) -> None:
    """Say why an LLMDeployment has as many replicas as it has: the last decisions, each with its figures.

    Shows every term of demand with its numbers and which one binds, the windows and limits that hold, where the figures
    came from and how old they are; then the history. Looks at the live run of quire up on this machine that serves the
    name, else at the cluster that kubectl would ask.

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
        told = await source.look(now().timestamp())
        console = plain_console()
        if not watch:
            if as_json:
                _print_json(told)
            else:
                console.print(view.render(told, now=now(), last=last))
        elif as_json:
            await _watch_json(source, told)
        elif console.is_terminal:
            with Redrawn(console) as screen:
                await _watch_screen(source, told, screen, last)
        else:
            await _watch_lines(source, told)
    finally:
        await source.close()


async def _watch_screen(source: Source, told: Explanation, screen: Redrawn, last: int) -> None:
    while True:
        screen.draw(view.render(told, now=now(), last=last))
        await asyncio.sleep(_LOOK_SECONDS)
        told = await _again(source, told, now())


async def _watch_json(source: Source, told: Explanation) -> None:
    before = None
    while True:
        if told != before:
            _print_json(told)
            before = told
        await asyncio.sleep(_LOOK_SECONDS)
        told = await _again(source, told, now())


async def _watch_lines(source: Source, told: Explanation) -> None:
    seen: Log = ()
    while True:
        for stretch in view.fresh_stretches(seen, told.history):
            print(view.line(told, stretch), flush=True)
        seen = told.history or seen
        if told.ended is not None:
            print(f"{told.name}: the run {told.ended}", flush=True)
            return
        await asyncio.sleep(_LOOK_SECONDS)
        told = await _again(source, told, now())


async def _again(source: Source, told: Explanation, time: datetime) -> Explanation:
    """Another look; while the API server is away, the last one with a note of it."""
    try:
        return await source.look(time.timestamp())
    except ClusterError as error:
        notice = Notice(subject="API server", reason=type(error).__name__, message=str(error))
        others = tuple(each for each in told.notices if each.subject != notice.subject)
        return msgspec.structs.replace(told, notices=(*others, notice))


def _print_json(told: Explanation) -> None:
    print(msgspec.json.encode(told).decode(), flush=True)
