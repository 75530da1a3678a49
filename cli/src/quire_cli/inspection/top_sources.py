"""The replicas for ``quire top``: of a local run, or the pods of a cluster; a ``Pages`` reads their metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from quire_cli.errors import InspectionProblem
from quire_cli.inspection.explanation import near_names
from quire_cli.inspection.fleet import Deployment, Fleet, Replica
from quire_cli.inspection.load import Reading
from quire_cli.inspection.replica_pages import MetricsTarget, Pages, target_of
from quire_cli.inspection.where import ended_note, user_error
from quire_cli.local.state import Run, read
from quire_common.contract import engine
from quire_common.names import url_host
from quire_operator.domain.cluster_state.observed import Key, Pod, Resource
from quire_operator.ports import ClusterError

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster_reading import KubeReader

_WITH_METRICS = frozenset({"Ready", "Draining"})


class FleetSource(Protocol):
    """A source. ``poll`` raises ``UserError``, or ``ClusterError`` for what may work at the next poll."""

    async def poll(self, now: float) -> Fleet: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _There:
    """A replica, and the address of its metrics if it has one."""

    replica: Replica
    asked: MetricsTarget | None


class RunFleet:
    """The replicas of ``quire up``."""

    def __init__(self, run: Run, names: Sequence[str], pages: Pages) -> None:
        self._folder, self._names, self._pages = run.folder, frozenset(names), pages
        self._seen = False

    async def poll(self, now: float) -> Fleet:
        run = _again(self._folder)
        state = run.state
        there = {
            name: [_local_replica(one.name, one.phase, one.url) for one in served.replica_states]
            for name, served in state.deployments.items()
            if not self._names or name in self._names
        }
        answers = await _ask(self._pages, [one for group in there.values() for one in group], first=not self._seen)
        self._seen = True
        return Fleet(
            place=f"quire up of {state.file} at {state.address}",
            how=self._pages.how,
            deployments=tuple(
                Deployment(
                    namespace=None,
                    name=name,
                    asked=state.deployments[name].replicas,
                    ready=state.deployments[name].ready_replicas,
                    replicas=tuple(_answered(one, answers) for one in group),
                )
                for name, group in there.items()
            ),
            note=None if run.is_live else f"this run {ended_note(state, now)}",
        )

    async def close(self) -> None:
        await self._pages.close()


class ClusterFleet:
    """The pods of LLMDeployments, of one namespace or all."""

    def __init__(self, reader: "KubeReader", namespace: str | None, names: Sequence[str], pages: Pages) -> None:
        self._reader, self._namespace, self._names, self._pages = reader, namespace, frozenset(names), pages
        self._seen = False

    async def poll(self, now: float) -> Fleet:
        try:
            # One after the other, so that the first error is reported.
            resources = await self._reader.resources(self._namespace)
            pods = await self._reader.replicas(self._namespace)
        except ClusterError as error:
            if self._seen:
                raise
            raise user_error(error, looking_for="LLMDeployment") from error
        self._check_names(resources)
        wanted = [resource for resource in resources if not self._names or resource.key.name in self._names]
        there: dict[Key, list[_There]] = {resource.key: [] for resource in wanted}
        for key, pod in pods:
            if key in there and pod.phase != "Failed":
                there[key].append(_pod_replica(key, pod))
        answers = await _ask(self._pages, [one for group in there.values() for one in group], first=not self._seen)
        self._seen = True
        where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        return Fleet(
            place=f"{self._reader.label}, {where}",
            how=self._pages.how,
            deployments=tuple(_of_resource(resource, there[resource.key], answers) for resource in wanted),
        )

    async def close(self) -> None:
        await self._pages.close()
        await self._reader.close()

    def _check_names(self, resources: Sequence[Resource]) -> None:
        known = [resource.key.name for resource in resources]
        where = "any namespace" if self._namespace is None else f"namespace {self._namespace}"
        for name in sorted(self._names - set(known)):
            if not self._seen:
                hint = near_names(name, known)
                raise InspectionProblem(
                    f"there is no LLMDeployment {name} in {where} of {self._reader.label}", hint=hint
                )


def _again(folder: Path) -> Run:
    run = read(folder)
    if run is None:
        raise InspectionProblem(f"the state of the run in {folder} is gone")
    return run


def _local_replica(name: str, phase: str, url: str | None) -> _There:
    askable = phase in _WITH_METRICS and url is not None
    asked = MetricsTarget(id=name, url=f"{url}{engine.METRICS_PATH}") if askable else None
    silence = "" if askable else f"it is {phase.lower()}"
    return _There(replica=Replica(id=name, name=name, phase=phase, silence=silence), asked=asked)


def _pod_replica(key: Key, pod: Pod) -> _There:
    where = Key(key.namespace, pod.name)
    phase = "Draining" if pod.deleting else "Ready" if pod.ready else "Loading" if pod.phase == "Running" else "Pending"
    askable = phase in _WITH_METRICS
    silence = "" if askable else f"it is {phase.lower()}"
    url = f"http://{url_host(pod.ip)}:{engine.HTTP_PORT}{engine.METRICS_PATH}" if pod.ip else None
    asked = MetricsTarget(id=str(where), pod=where, url=url) if askable else None
    return _There(replica=Replica(id=str(where), name=pod.name, phase=phase, silence=silence), asked=asked)


@dataclass(frozen=True, slots=True)
class _Answers:
    latest: Mapping[str, Reading | str]
    earlier: Mapping[str, Reading]


async def _ask(pages: Pages, there: Sequence[_There], *, first: bool) -> _Answers:
    latest = await pages.read([one.asked for one in there if one.asked is not None])
    return _Answers(latest, await pages.earlier() if first else {})


def _answered(one: _There, answers: _Answers) -> Replica:
    match answers.latest.get(one.replica.id):
        case Reading() as reading:
            where = target_of(None if one.asked is None else one.asked.url)
            earlier = answers.earlier.get(one.replica.id) or answers.earlier.get(where)
            return replace(one.replica, reading=reading, earlier=earlier)
        case str() as silence:
            return replace(one.replica, silence=silence)
    return one.replica


def _of_resource(resource: Resource, there: Sequence[_There], answers: _Answers) -> Deployment:
    asked = resource.status.get("desiredReplicas")
    return Deployment(
        namespace=resource.key.namespace,
        name=resource.key.name,
        asked=asked if isinstance(asked, int) else None,
        ready=sum(one.replica.phase == "Ready" for one in there),
        replicas=tuple(_answered(one, answers) for one in there),
    )
