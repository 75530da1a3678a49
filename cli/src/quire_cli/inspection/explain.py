"""``quire explain``: the command, the loop of --watch, and the sources of an explanation.

A source is a run's state file, or the status of an LLMDeployment and its operator through the API server.
"""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from quire_cli.errors import InspectionProblem
from quire_cli.inspection.explanation import (
    Explanation,
    Notice,
    OperatorReport,
    fresh_stretches,
    line,
    of_resource,
    of_run,
    render,
)
from quire_cli.inspection.where import (
    ContextOption,
    KubeconfigOption,
    LocalOption,
    NamespaceOption,
    RunOption,
    Where,
    ended_note,
    no_such,
    now,
    of_place,
    only_name,
    open_target,
    readable,
    redrawn,
    until_interrupted,
    user_error,
)
from quire_cli.local.state import Run, read
from quire_cli.options import URL, plain_console
from quire_operator.autoscaling.ticks import Log, read_log
from quire_operator.kube.errors import ClusterError, Forbidden, NotFound
from quire_operator.kube.objects import Key

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster import KubeReader

_OPERATOR_PORT = 8080
"""The operator's port in the chart."""
_URL_SECONDS = 5.0
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
    source = await _source_of(name, where, operator_url)
    try:
        explained = await source.poll(now().timestamp())
        console = plain_console()
        if not watch and as_json:
            _print_json(explained)
        elif not watch:
            console.print(render(explained, now=now(), last=last))
        elif as_json or not console.is_terminal:
            await _watch(source, explained, _print_changes() if as_json else _print_lines())
        else:
            with redrawn(console) as screen:

                def show(explained: Explanation) -> None:
                    screen.update(render(explained, now=now(), last=last), refresh=True)

                await _watch(source, explained, show, stays=True)
    finally:
        await source.close()


_Show = Callable[[Explanation], None]


async def _watch(
    source: "RunSource | ClusterSource", explained: Explanation, show: _Show, *, stays: bool = False
) -> None:
    """Show each explanation until the end of a local run; one that ``stays`` is refreshed until Ctrl-C."""
    while True:
        show(explained)
        if explained.ended is not None and not stays:
            return
        await asyncio.sleep(_POLL_SECONDS)
        explained = await _refresh(source, explained)


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
        for stretch in fresh_stretches(seen, explained.history):
            print(line(explained, stretch), flush=True)
        seen = explained.history or seen
        if explained.ended is not None:
            print(f"{explained.name}: the run {explained.ended}", flush=True)

    return show


async def _refresh(source: "RunSource | ClusterSource", explained: Explanation) -> Explanation:
    """Poll again; while the API server is unreachable, return the last result with a notice."""
    try:
        return await source.poll(now().timestamp())
    except ClusterError as error:
        notice = Notice(subject="API server", reason=type(error).__name__, message=str(error))
        others = tuple(each for each in explained.notices if each.subject != notice.subject)
        return msgspec.structs.replace(explained, notices=(*others, notice))


def _print_json(explained: Explanation) -> None:
    print(msgspec.json.encode(explained).decode(), flush=True)


async def _source_of(name: str | None, where: Where, operator_url: str | None) -> "RunSource | ClusterSource":
    """Return the source for this name, or raise ``UserError``."""
    found = await open_target(where, [] if name is None else [name], os.environ)
    if isinstance(found, Run):
        state = found.state
        return RunSource(found, name or only_name(sorted(state.deployments), where=f"the run of {state.file}"))
    namespace = where.namespace or found.namespace
    try:
        if name is None:
            known = [resource.key.name for resource in await found.resources(namespace)]
            name = only_name(known, where=f"namespace {namespace} of {found.label}")
        return ClusterSource(found, Key(namespace, name), operator_url)
    except BaseException as error:
        await found.close()
        if isinstance(error, ClusterError):
            raise user_error(error, looking_for="LLMDeployment to explain") from error
        raise


class RunSource:
    """A run on this machine, live or ended."""

    def __init__(self, run: Run, name: str) -> None:
        self._folder, self._name = run.folder, name

    async def poll(self, now: float) -> Explanation:
        run = read(self._folder)
        if run is None or self._name not in run.state.deployments:
            raise InspectionProblem(f"the state of the run that served {self._name} is gone")
        state = run.state
        ended = None if run.is_live else ended_note(state, now)
        served = state.deployments[self._name]
        place = f"quire up of {state.file} at {state.address}"
        return of_run(self._name, served, place=place, ended=ended)

    async def close(self) -> None: ...


class ClusterSource:
    """An LLMDeployment's status and its operator's decisions."""

    def __init__(self, reader: "KubeReader", key: Key, operator_url: str | None) -> None:
        self._reader, self._key, self._operator_url = reader, key, operator_url
        self._leader: Key | None = None
        self._seen = False

    async def poll(self, now: float) -> Explanation:
        try:
            resource = await self._reader.resource(self._key)
        except NotFound as error:
            raise await self._absent(error) from error
        except Forbidden as error:
            raise user_error(error, looking_for=str(self._key)) from error
        except ClusterError as error:
            if self._seen:
                raise
            raise user_error(error, looking_for=str(self._key)) from error
        self._seen = True
        report = await self._operator_report()
        return of_resource(resource, report, place=self._reader.label, now=now)

    async def close(self) -> None:
        await self._reader.close()

    async def _absent(self, error: NotFound) -> Exception:
        if self._key.name not in str(error):
            return user_error(error, looking_for=f"LLMDeployment {self._key.name}")
        try:
            known = [resource.key.name for resource in await self._reader.resources(self._key.namespace)]
        except ClusterError:
            known = []
        return no_such(self._key, known, place=self._reader.label)

    async def _operator_report(self) -> OperatorReport:
        """Return the decisions of the leading operator; the others report none."""
        if self._operator_url is not None:
            return await self._report_from(self._operator_url)
        try:
            pods = [self._leader] if self._leader is not None else await self._operators()
        except Forbidden as error:
            return _no_report(f"{readable(str(error))}, which reading from the operator requires")
        except ClusterError as error:
            return _no_report(str(error))
        problem = "no pod of quire's operator runs in this cluster; use --operator-url for an operator elsewhere"
        for pod in pods:
            try:
                answer = await self._reader.page(pod, _OPERATOR_PORT, self._path)
            except Forbidden as error:
                problem = f"{readable(str(error))}, which reading from the operator requires"
            except ClusterError as error:
                problem = str(error)
            else:
                self._leader = pod
                return _read_report(answer)
        self._leader = None
        return _no_report(problem)

    async def _operators(self) -> list[Key]:
        """Return the operators in all namespaces, or in the LLMDeployment's own if the user may not list all."""
        try:
            return await self._reader.operators(None)
        except Forbidden:
            with contextlib.suppress(ClusterError):
                if found := await self._reader.operators(self._key.namespace):
                    return found
            raise

    async def _report_from(self, url: str) -> OperatorReport:
        import httpx  # slow

        try:
            async with httpx.AsyncClient(timeout=_URL_SECONDS, trust_env=False) as client:
                answer = await client.get(url.rstrip("/") + self._path)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return _no_report(f"{url} does not answer: {error or type(error).__name__}")
        if answer.status_code != 200:
            return _no_report(f"{url} answers {answer.status_code}: {answer.text[:200]}")
        return _read_report(answer.content)

    @property
    def _path(self) -> str:
        return f"/decisions/{self._key.namespace}/{self._key.name}"


def _read_report(answer: bytes) -> OperatorReport:
    try:
        log = read_log(json.loads(answer))
    except ValueError:
        log = ()
    return OperatorReport(
        log=log, problem=None if log else "the operator's answer cannot be read; its version may differ"
    )


def _no_report(problem: str) -> OperatorReport:
    return OperatorReport(log=(), problem=problem)
