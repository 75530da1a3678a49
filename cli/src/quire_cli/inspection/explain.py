"""``quire explain``: the command line, and the loop of --watch. ``explain_sources`` reads, ``explain_view`` draws."""

import asyncio
import os
from collections.abc import Callable
from datetime import datetime
from typing import Annotated

import msgspec
import typer

from quire_cli.inspection import explain_view as view
from quire_cli.inspection.explain_sources import ExplanationSource, source_of
from quire_cli.inspection.explanation import Explanation, Notice
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
from quire_cli.inspection.where import Where
from quire_cli.options import URL, plain_console
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
        of_place(
            "Read from the operator at this address, such as a forwarded port (default: use the API server).", **URL
        ),
    ] = None,
) -> None:
    """Explain the number of replicas of an LLMDeployment: the last decisions, each with its figures.

    Shows the demand per signal and the limiting signal, the windows and limits in effect, and the source and age of the
    figures; then the history. Uses the live run of quire up on this machine that serves the name, else the cluster that
    kubectl would use. With rollout.strategy Canary, it also compares both revisions.

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
        if not watch and as_json:
            _print_json(explained)
        elif not watch:
            console.print(view.render(explained, now=now(), last=last))
        elif as_json or not console.is_terminal:
            await _watch(source, explained, _print_changes() if as_json else _print_lines())
        else:
            with redrawn(console) as screen:

                def show(explained: Explanation) -> None:
                    screen.update(view.render(explained, now=now(), last=last), refresh=True)

                await _watch(source, explained, show, stays=True)
    finally:
        await source.close()


_Show = Callable[[Explanation], None]


async def _watch(source: ExplanationSource, explained: Explanation, show: _Show, *, stays: bool = False) -> None:
    """Show each explanation until the end of a local run; one that ``stays`` is refreshed until Ctrl-C."""
    while True:
        show(explained)
        if explained.ended is not None and not stays:
            return
        await asyncio.sleep(_POLL_SECONDS)
        explained = await _refresh(source, explained, now())


def _print_changes() -> _Show:
    before: Explanation | None = None

    def show(explained: Explanation) -> None:
        nonlocal before
        if explained != before:
            _print_json(explained)
        before = explained

    return show


def _print_lines() -> _Show:
    seen: Log = ()

    def show(explained: Explanation) -> None:
        nonlocal seen
        for stretch in view.fresh_stretches(seen, explained.history):
            print(view.line(explained, stretch), flush=True)
        seen = explained.history or seen
        if explained.ended is not None:
            print(f"{explained.name}: the run {explained.ended}", flush=True)

    return show


async def _refresh(source: ExplanationSource, explained: Explanation, time: datetime) -> Explanation:
    """Poll again; while the API server is unreachable, return the last result with a notice."""
    try:
        return await source.poll(time.timestamp())
    except ClusterError as error:
        notice = Notice(subject="API server", reason=type(error).__name__, message=str(error))
        others = tuple(each for each in explained.notices if each.subject != notice.subject)
        return msgspec.structs.replace(explained, notices=(*others, notice))


def _print_json(explained: Explanation) -> None:
    print(msgspec.json.encode(explained).decode(), flush=True)
