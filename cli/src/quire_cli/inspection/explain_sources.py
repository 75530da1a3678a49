"""The sources of ``quire explain``: a run's state file, or status and the operator through the API server."""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

import httpx

from quire_cli.errors import InspectionProblem
from quire_cli.inspection.explanation import Explanation, OperatorReport, of_resource, of_run
from quire_cli.inspection.rights import readable
from quire_cli.inspection.where import Where, ended_note, no_such, only_name, open_target, user_error
from quire_cli.local.state import Run, read
from quire_operator.domain.autoscaling.ticks import read_log
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.ports import ClusterError, Forbidden, NotFound

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster_reading import KubeReader

_OPERATOR_PORT = 8080
"""The operator's port in the chart."""
_URL_SECONDS = 5.0


class ExplanationSource(Protocol):
    """A source. ``poll`` raises ``UserError``, or ``ClusterError`` for what may work at the next poll."""

    async def poll(self, now: float) -> Explanation: ...

    async def close(self) -> None: ...


async def source_of(
    name: str | None, where: Where, environ: Mapping[str, str], *, operator_url: str | None = None
) -> ExplanationSource:
    """Return the source for this name, or raise ``UserError``."""
    found = await open_target(where, [] if name is None else [name], environ)
    if isinstance(found, Run):
        return RunSource(
            found, name or only_name(sorted(found.state.deployments), where=f"the run of {found.state.file}")
        )
    return await _cluster_source(found, name, where, operator_url)


async def _cluster_source(
    reader: "KubeReader", name: str | None, where: Where, operator_url: str | None
) -> ExplanationSource:
    namespace = where.namespace or reader.namespace
    try:
        if name is None:
            found = [resource.key.name for resource in await reader.resources(namespace)]
            name = only_name(found, where=f"namespace {namespace} of {reader.label}")
        return ClusterSource(reader, Key(namespace, name), operator_url)
    except ClusterError as error:
        await reader.close()
        raise user_error(error, looking_for="LLMDeployment to explain") from error
    except BaseException:
        await reader.close()
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
        return of_resource(resource, report, place=self._reader.label, now=time.time())

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
