"""The replicas for ``quire top``, of a local run or of a cluster, and their metrics.

Metrics come from the replicas, through the API server, or from Prometheus. A problem with one replica is reported for
that replica, and does not affect the others.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx

from quire_cli.errors import InspectionProblem
from quire_cli.inspection.load import NAMES, Deployment, Fleet, Reading, Replica, reading_of
from quire_cli.inspection.where import ended_note, near_names, readable, user_error
from quire_cli.local.state import ReplicaState, Run, read
from quire_common.contract import engine
from quire_common.metrics_page import MAX_PAGE_BYTES, points
from quire_common.names import url_host
from quire_common.quantities import format_duration
from quire_operator.autoscaling.engine_metrics import PrometheusOptions, Told
from quire_operator.autoscaling.prometheus import Prometheus
from quire_operator.autoscaling.supply import SAMPLE_SECONDS
from quire_operator.kube.errors import ClusterError
from quire_operator.kube.objects import Key, Pod, Resource

if TYPE_CHECKING:  # slow to import
    from quire_cli.inspection.cluster import KubeReader

_SECONDS = 4.0
_AT_ONCE = 64
_KEPT_OUT = "; if a NetworkPolicy blocks the API server, use --prometheus-url"
_NO_ENGINE = "its answer is not the metrics page of an engine"


class Pages:
    """A way to read replicas' metrics, page by page."""

    how: str
    """The way of reading, as text."""

    async def read(self, replicas: Sequence[Replica]) -> Mapping[str, Reading | str]:
        """Return for each id the reading, or the reason why it is missing."""
        answers = await asyncio.gather(*map(self._read, replicas))
        return {replica.id: answer for replica, answer in zip(replicas, answers, strict=True)}

    async def earlier(self) -> Mapping[str, Reading]:
        """Return earlier readings to compare a first poll with, by id or by ``host:port``."""
        return {}

    async def close(self) -> None: ...

    async def _read(self, replica: Replica) -> Reading | str:
        raise NotImplementedError


class DirectPages(Pages):
    """The pages of replicas, each read at its own address."""

    how = "scraped directly"

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=_AT_ONCE, max_keepalive_connections=_AT_ONCE)
        self._client = httpx.AsyncClient(timeout=_SECONDS, trust_env=False, limits=limits)

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self, replica: Replica) -> Reading | str:
        assert replica.url is not None, "a run's replicas have addresses"
        try:
            async with asyncio.timeout(_SECONDS):
                response = await self._client.get(replica.url)
        except TimeoutError:
            return f"no answer within {_SECONDS:g} s"
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return f"no answer: {error or type(error).__name__}"
        if response.status_code != 200:
            return f"it answered {response.status_code}"
        return _reading(response.text)


class ProxiedPages(Pages):
    """The pages of pods, read through the API server, which needs permission to get pods/proxy."""

    how = "scraped through the API server (pods/proxy)"

    def __init__(self, reader: "KubeReader") -> None:
        self._reader, self._gate = reader, asyncio.Semaphore(_AT_ONCE)

    async def _read(self, replica: Replica) -> Reading | str:
        assert replica.pod is not None, "a cluster's replicas are pods"
        try:
            async with self._gate:
                page = await self._reader.page(replica.pod, engine.HTTP_PORT, engine.METRICS_PATH)
        except ClusterError as error:
            timed_out = "did not answer" in str(error) or "timeout" in str(error)
            return readable(str(error)) + (_KEPT_OUT if timed_out else "")
        return _reading(page.decode(errors="replace"))


class PrometheusPages(Pages):
    """The pages of all replicas as Prometheus last scraped them."""

    def __init__(self, url: str) -> None:
        self._prometheus = Prometheus(PrometheusOptions(url=url), clock=time.time)
        self.how = f"by Prometheus at {url}"

    async def read(self, replicas: Sequence[Replica]) -> Mapping[str, Reading | str]:
        told = await self._prometheus.told(NAMES)
        if told is None:
            silence = f"no answer from Prometheus: {self._prometheus.problem}"
            return {replica.id: silence for replica in replicas}
        now = time.time()
        return {replica.id: _told(told.get(replica.id) or told.get(replica.target), now) for replica in replicas}

    async def earlier(self) -> Mapping[str, Reading]:
        """Return the readings of a minute ago: one scrape has no rate."""
        told = await self._prometheus.told(NAMES, offset="1m") or {}
        now = time.time()
        read = {replica: reading_of(each.points, time=now - each.age) for replica, each in told.items()}
        return {replica: reading for replica, reading in read.items() if reading is not None}

    async def close(self) -> None:
        await self._prometheus.aclose()


def _told(told: Told | None, now: float) -> Reading | str:
    if told is None:
        return "Prometheus has no figures for it"
    if told.age > SAMPLE_SECONDS:
        return f"Prometheus last scraped it {format_duration(float(round(told.age)))} ago"
    return reading_of(told.points, time=now - told.age) or "Prometheus has no figures for it"


def _reading(page: str) -> Reading | str:
    found = points(page, NAMES) if len(page) <= MAX_PAGE_BYTES else []
    return reading_of(found, time=time.time()) or _NO_ENGINE


class _Source:
    """Replicas whose metrics are read. ``poll`` raises ``UserError``, or ``ClusterError`` for what may work again."""

    def __init__(self, names: Sequence[str], pages: Pages) -> None:
        self._names, self._pages, self._polled = frozenset(names), pages, False

    async def close(self) -> None:
        await self._pages.close()

    def _wants(self, name: str) -> bool:
        return not self._names or name in self._names

    async def _with_readings(self, deployments: Sequence[Deployment]) -> tuple[Deployment, ...]:
        asked = [replica for deployment in deployments for replica in deployment.replicas if replica.has_metrics]
        latest = await self._pages.read(asked)
        earlier = {} if self._polled else await self._pages.earlier()
        self._polled = True

        def answered(replica: Replica) -> Replica:
            match latest.get(replica.id):
                case Reading() as reading:
                    before = earlier.get(replica.id) or earlier.get(replica.target)
                    return replace(replica, reading=reading, earlier=before)
                case str() as silence:
                    return replace(replica, silence=silence)
            return replace(replica, silence=f"it is {replica.phase.lower()}")

        return tuple(replace(each, replicas=tuple(map(answered, each.replicas))) for each in deployments)


class RunFleet(_Source):
    """The replicas of ``quire up``."""

    def __init__(self, run: Run, names: Sequence[str], pages: Pages) -> None:
        super().__init__(names, pages)
        self._folder = run.folder

    async def poll(self, now: float) -> Fleet:
        run = read(self._folder)
        if run is None:
            raise InspectionProblem(f"the state of the run in {self._folder} is gone")
        state = run.state
        deployments = [
            Deployment(
                namespace=None,
                name=name,
                asked=served.replicas,
                ready=served.ready_replicas,
                replicas=tuple(map(_local_replica, served.replica_states)),
            )
            for name, served in state.deployments.items()
            if self._wants(name)
        ]
        return Fleet(
            place=f"quire up of {state.file} at {state.address}",
            how=self._pages.how,
            deployments=await self._with_readings(deployments),
            note=None if run.is_live else f"this run {ended_note(state, now)}",
        )


class ClusterFleet(_Source):
    """The pods of LLMDeployments, of one namespace or all."""

    def __init__(self, reader: "KubeReader", namespace: str | None, names: Sequence[str], pages: Pages) -> None:
        super().__init__(names, pages)
        self._reader, self._namespace = reader, namespace

    async def poll(self, now: float) -> Fleet:
        try:
            # One after the other, so that the first error is reported.
            resources = await self._reader.resources(self._namespace)
            pods = await self._reader.replicas(self._namespace)
        except ClusterError as error:
            if self._polled:
                raise
            raise user_error(error, looking_for="LLMDeployment") from error
        if not self._polled:
            self._check_names([resource.key.name for resource in resources])
        replicas: dict[Key, list[Replica]] = {r.key: [] for r in resources if self._wants(r.key.name)}
        for key, pod in pods:
            if key in replicas and pod.phase != "Failed":
                replicas[key].append(_pod_replica(key, pod))
        deployments = [_deployment(each, replicas[each.key]) for each in resources if each.key in replicas]
        where = "all namespaces" if self._namespace is None else f"namespace {self._namespace}"
        return Fleet(
            place=f"{self._reader.label}, {where}",
            how=self._pages.how,
            deployments=await self._with_readings(deployments),
        )

    async def close(self) -> None:
        await super().close()
        await self._reader.close()

    def _check_names(self, known: Sequence[str]) -> None:
        where = "any namespace" if self._namespace is None else f"namespace {self._namespace}"
        for name in sorted(self._names - set(known)):
            problem = f"there is no LLMDeployment {name} in {where} of {self._reader.label}"
            raise InspectionProblem(problem, hint=near_names(name, known))


def _local_replica(one: ReplicaState) -> Replica:
    url = None if one.url is None else f"{one.url}{engine.METRICS_PATH}"
    return Replica(id=one.name, name=one.name, phase=one.phase, url=url)


def _pod_replica(key: Key, pod: Pod) -> Replica:
    where = Key(key.namespace, pod.name)
    phase = "Draining" if pod.deleting else "Ready" if pod.ready else "Loading" if pod.phase == "Running" else "Pending"
    url = f"http://{url_host(pod.ip)}:{engine.HTTP_PORT}{engine.METRICS_PATH}" if pod.ip else None
    return Replica(id=str(where), name=pod.name, phase=phase, pod=where, url=url)


def _deployment(resource: Resource, replicas: Sequence[Replica]) -> Deployment:
    asked = resource.status.get("desiredReplicas")
    return Deployment(
        namespace=resource.key.namespace,
        name=resource.key.name,
        asked=asked if isinstance(asked, int) else None,
        ready=sum(replica.phase == "Ready" for replica in replicas),
        replicas=tuple(replicas),
    )
