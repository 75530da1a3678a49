"""The operator's process: it builds its parts, runs them in one event loop and stops them in order.

The watches always run, so that a standby knows the cluster when it takes over. The parts that write run only while this
process leads.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from quire_operator.admission import AdapterReviewer, Reviewer
from quire_operator.app.resource_metrics import ResourceMetrics
from quire_operator.app.settings import Settings
from quire_operator.app.telemetry import Server, Telemetry
from quire_operator.app.watches import Inbox, Login, Watching, Webhook
from quire_operator.autoscaling.autoscale import Autoscaler, keep_scaling
from quire_operator.autoscaling.controller import ClusterScaling
from quire_operator.autoscaling.decide import Decision
from quire_operator.autoscaling.prometheus import Prometheus
from quire_operator.autoscaling.scrape import Gateways, MetricsSources, Pages, Scraper
from quire_operator.autoscaling.ticks import Log
from quire_operator.canary.controller import PERIOD_SECONDS, Canaries
from quire_operator.capacity.check import CapacityCheck
from quire_operator.capacity.hub import HubFacts, HubReader
from quire_operator.deployment.controller import Options, Reconciler, Sources, retry_after
from quire_operator.deployment.downloads import Downloads
from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.deployment.observe import OptionalKinds, Relisting
from quire_operator.deployment.store import Cluster, Store
from quire_operator.deployment.workqueue import Workers
from quire_operator.errors import ClusterProblem
from quire_operator.kube.client import WAKE_SLICES, KubeClient
from quire_operator.kube.connection import Checkpoint, Connection, credentials, load_configuration, own_namespace
from quire_operator.kube.errors import ClusterError, Forbidden, NotLeading
from quire_operator.kube.gateway_pods import GatewayPods
from quire_operator.kube.lease import Elector, KubeLeases, WriteFence
from quire_operator.kube.objects import Key
from quire_operator.lora.controller import Adapters

logger = logging.getLogger(__name__)

_GRACE_SECONDS, _RETRY_SECONDS = 2.0, 10.0
_PAGE_SECONDS, _PAGE_BYTES = 3.0, 2**19
"""For what pods report. A report about 2,000 adapters, which is the longest, has about this size."""
_JSON_LEVELS = 20_000
"""Twice the nesting depth that the API server stores. With Python's own limit of 1,000, a spec that is nested more
deeply would end all watches and so the work for all LLMDeployments.
"""


async def run(settings: Settings, *, before_write: Checkpoint | None = None) -> None:
    """Run the operator until SIGTERM or SIGINT. Raises ``UserError`` for problems that the user can fix.

    Tests use ``before_write`` to stop the process between any two writes.
    """
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _JSON_LEVELS))
    configuration = await load_configuration(settings.kubeconfig)
    fence, telemetry = WriteFence(), Telemetry()
    connection = Connection(
        configuration, user=settings.identity, fence=fence.is_open, before_write=before_write, written=telemetry.written
    )
    lease_connection = Connection(configuration, user=settings.identity)
    review_connection = Connection(configuration, user=settings.identity)
    try:
        operator = Operator(settings, connection, lease_connection, fence, telemetry)
        reviewer = Reviewer(kube=KubeClient(review_connection), images=settings.images, capacity=operator.capacity)
        await operator.run(lambda: credentials(configuration), webhook=_webhook(settings, reviewer, operator.adapters))
    finally:
        await connection.close()
        await lease_connection.close()
        await review_connection.close()


def _webhook(settings: Settings, reviewer: Reviewer, adapters: Adapters) -> Webhook | None:
    if settings.webhook is None:
        return None
    judge_adapter = AdapterReviewer(adapters.preview).review
    return Webhook(options=settings.webhook, judge=reviewer.review, judge_adapter=judge_adapter)


def _hub(settings: Settings) -> str | None:
    return settings.images.hub_endpoint or os.environ.get("HF_ENDPOINT")


class LeadingAutoscaler:
    """The autoscaler of the leader. Each ``run`` starts without memory of earlier ticks."""

    def __init__(
        self,
        settings: Settings,
        telemetry: Telemetry,
        cluster: Cluster,
        *,
        reconciler: Reconciler,
        gateways: Callable[[], Awaitable[Sequence[str]]],
    ) -> None:
        """``gateways`` returns the addresses of all gateways."""
        self._settings, self._telemetry, self._store, self._clock = settings, telemetry, cluster.store, cluster.clock
        self._reconciler, self._gateways = reconciler, gateways
        self._scaling: ClusterScaling | None = None
        """Set only while it runs."""

    def decisions(self, key: str) -> Log:
        """Return the recent decisions for an LLMDeployment; empty while another process leads."""
        return () if self._scaling is None else self._scaling.decisions(key)

    async def run(self) -> None:
        """Decide at intervals until cancelled."""
        options, told = self._settings.prometheus, self._telemetry.scaling
        prometheus = None if options is None else Prometheus(options, clock=self._clock, failed=told.prometheus_failed)
        scraper, gateways = Scraper(clock=self._clock, failed=told.scrape_failed), Gateways(self._gateways)
        sources = MetricsSources(pods=scraper, prometheus=prometheus, gateways=gateways)
        self._scaling = scaling = ClusterScaling(
            store=self._store,
            pending=self._reconciler.scaling,
            requested_name=self._reconciler.served_names.requested_name,
            prometheus_problem=None if prometheus is None else lambda: prometheus.problem,
        )
        autoscaler = Autoscaler(metrics=sources, target=scaling, clock=self._clock)
        told.show(
            lambda: scaling.latest,
            last_answer=None if prometheus is None else lambda: prometheus.last_answer,
            gateways=lambda: None if gateways.asked is None else (gateways.asked, gateways.answered),
        )
        try:
            period = self._settings.autoscaling_period_seconds
            await keep_scaling(autoscaler, scaling, tick_seconds=period, decided=self._count, ticked=told.ticks.observe)
        finally:
            self._scaling = None
            told.hide()
            await sources.aclose()

    def _count(self, decision: Decision) -> None:
        self._telemetry.decisions.labels(reason=decision.reason.value).inc()


class Operator:
    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        lease_connection: Connection,
        fence: WriteFence,
        telemetry: Telemetry,
    ) -> None:
        self._settings, self._fence, self._telemetry = settings, fence, telemetry
        self._namespace = settings.namespace or own_namespace()
        self._workers: Workers[Key] = Workers(
            self._reconcile, on_error=self._on_error, now=time.monotonic, random=random.random, limit=settings.workers
        )
        kube, store = KubeClient(connection, namespaces=settings.watch_namespaces), Store()
        self._cluster = cluster = Cluster(kube=kube, store=store, enqueue=self._workers.add)
        # Without the capacity check, the operator sends no requests to the hub.
        hub = HubReader(HubFacts(_hub(settings)), now=time.monotonic) if settings.capacity_check else None
        self.capacity = None if hub is None else self._make_capacity_check(hub)
        self._pods = Pages(timeout_seconds=_PAGE_SECONDS, max_bytes=_PAGE_BYTES)
        self._optional_kinds, self._downloads = OptionalKinds(cluster), Downloads(cluster, self._pods)
        period = min(PERIOD_SECONDS, settings.autoscaling_period_seconds)
        self._canaries = Canaries(cluster, period_seconds=period)
        scope = settings.features.served_names
        self.adapters = Adapters(cluster, reader=self._pods, scope=lambda: scope)
        self._reconciler = self._make_reconciler(hub)
        self._gateways = GatewayPods(
            lambda path, query: connection.read(path, query=query),
            namespace=self._namespace,
            selector=settings.gateway_selector,
            urls=settings.gateway_urls,
        )
        self._elector = Elector(
            leases=KubeLeases(lease_connection, namespace=self._namespace, name=settings.lease_name),
            identity=settings.identity,
            fence=fence,
            lead=self._lead,
            seen=self._lease_called,
        )
        self._autoscaler = LeadingAutoscaler(
            settings, telemetry, cluster, reconciler=self._reconciler, gateways=self._gateways.addresses
        )
        self._relisting = Relisting(
            cluster,
            workers=self._workers,
            adapters=self.adapters.resync,
            period_seconds=settings.resync_seconds,
            reported=telemetry.unlisted,
        )
        self._stop = asyncio.Event()
        self._watching = self._make_watching()

    def _make_reconciler(self, hub: HubReader | None) -> Reconciler:
        options = Options(
            images=self._settings.images,
            cluster_domain=self._settings.cluster_domain,
            max_concurrent_rollouts=self._settings.max_concurrent_rollouts,
            features=self._features,
        )
        sources = Sources(
            capacity=self.capacity,
            hub=hub,
            canaries=self._canaries,
            download=self._downloads.progress,
            adapters=self.adapters.entries,
            adapter_claims=self.adapters.claims,
        )
        return Reconciler(self._cluster, options, sources)

    def _make_watching(self) -> Watching:
        return Watching(
            inbox=Inbox(
                store=self._cluster.store,
                adapters=self.adapters,
                namespaces=frozenset(self._settings.watch_namespaces),
                enqueue=self._workers.add,
                relisted=self._relisting.request,
                lease_seen=self._lease_seen,
            ),
            kube=self._cluster.kube,
            namespace=self._namespace,
            lease_name=self._settings.lease_name,
            started=self._catch_signals,  # kopf has just put its own handlers there
        )

    def _make_capacity_check(self, hub: HubReader) -> CapacityCheck:
        everywhere = not self._settings.watch_namespaces  # otherwise it may not list nodes
        return CapacityCheck(
            hub=hub, kube=self._cluster.kube if everywhere else None, now=time.monotonic, enqueue=self._workers.add
        )

    async def run(self, login: Login, *, webhook: Webhook | None = None) -> None:
        """Run until stopped, then release the Lease so that a standby can lead at once."""
        resources = ResourceMetrics(self._cluster.store, leading=self._fence.is_open)
        server = Server(
            self._telemetry,
            problem=self._watching.problem,
            ready=self._watching.running.is_set,
            shortfall=self._shortfall,
            refresh=self._refresh_gauges,
            decisions=self._autoscaler.decisions,
            resources=lambda: resources.text(datetime.now(UTC)),
        )
        self._catch_signals()
        try:
            port = await server.start(self._settings.host, self._settings.port)
        except OSError as error:
            where = f"{self._settings.host}:{self._settings.port}"
            raise ClusterProblem(f"cannot listen on {where}: {error.strerror}", hint="choose another --port") from error
        logger.info("serving /healthz and /metrics on port %d, as %s", port, self._settings.identity)
        tasks = [asyncio.create_task(self._watching.run(login, webhook), name="watches")]
        try:
            # A process without a view of the cluster must not lead: the first list comes before the first campaign.
            await self._until_stopped(self._watching.running.wait(), *tasks)
            tasks.append(asyncio.create_task(self._elector.run(), name="elector"))
            await self._until_stopped(asyncio.Event().wait(), *tasks)
        finally:
            for task in reversed(tasks):  # the elector first: it releases the Lease
                task.cancel()
                await asyncio.wait({task})
            await server.stop()
            await self._pods.aclose()
            if self.capacity is not None:
                await self.capacity.aclose()
        for task in tasks:
            if not task.cancelled():
                task.result()

    async def _until_stopped(self, done: Awaitable[object], *tasks: asyncio.Task[None]) -> None:
        """Wait for ``done``, a signal, or the end of a task, which happens only when it fails."""
        waiting = {asyncio.ensure_future(done), asyncio.ensure_future(self._stop.wait())}
        await asyncio.wait(waiting | set(tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()

    # --- the Lease ---

    def _lease_seen(self, holder: str, renewed: datetime | None) -> None:
        self._watching.health.note_watch(renewed)
        self._elector.notice(holder)

    def _lease_called(self, renewed: datetime | None) -> None:
        self._watching.health.note_call(renewed, time.monotonic())

    # --- leading ---

    async def _lead(self) -> None:
        self._reconciler.forget()
        await self._optional_kinds.refresh()
        await self._relisting.once()
        for key in self._cluster.store.all_keys():
            self._workers.add(key)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._workers.run(grace_seconds=_GRACE_SECONDS))
            group.create_task(self._relisting.repeat())
            group.create_task(self._optional_kinds.follow(self._settings.discovery_seconds))
            group.create_task(self._autoscaler.run())
            group.create_task(self._downloads.follow())
            group.create_task(self.adapters.follow())
            group.create_task(self._follow_canaries())
            group.create_task(self._delete_wake_slices())

    async def _delete_wake_slices(self) -> None:
        """Delete the EndpointSlices of earlier versions once: with them, some requests to a Service find no replica."""
        while True:
            try:
                await self._cluster.kube.delete_wake_slices()
                return
            except Forbidden as error:
                command = f"kubectl delete endpointslices -A -l {WAKE_SLICES}"
                logger.warning("cannot delete EndpointSlices of earlier versions; run `%s`: %s", command, error)
                return
            except ClusterError as error:
                logger.info("deleting EndpointSlices of earlier versions failed, retrying: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _follow_canaries(self) -> None:
        gateways = Gateways(self._gateways.addresses)
        try:
            await self._canaries.follow(gateways)
        finally:
            await gateways.aclose()

    def _features(self) -> ClusterFeatures:
        return replace(self._settings.features, served_kinds=self._optional_kinds.served)

    async def _reconcile(self, key: Key) -> float | None:
        with self._telemetry.reconciles.time():
            return await self._reconciler.reconcile(key)

    def _on_error(self, key: Key, error: Exception) -> float | None:
        self._telemetry.errors.labels(reason=type(error).__name__).inc()
        if isinstance(error, NotLeading):
            logger.info("%s: %s", key, error)
        elif isinstance(error, ClusterError):
            hint = "; check the operator's role" if isinstance(error, Forbidden) else ""
            logger.warning("%s: %s%s", key, error, hint)
        else:
            logger.error("%s: unhandled exception (bug)", key, exc_info=error)
        return retry_after(error)

    # --- itself ---

    def _shortfall(self) -> str | None:
        """Return what this process cannot do for lack of permissions, or None."""
        if not self._relisting.unlisted_kinds or not self._fence.is_open():
            return None
        return f"no permission to list {', '.join(sorted(self._relisting.unlisted_kinds))}: check the operator's role"

    def _refresh_gauges(self) -> None:
        self._telemetry.stands(leading=self._fence.is_open(), waiting=len(self._workers.queue))
        self._telemetry.watch_lag.set(self._watching.lag())

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(ValueError):  # not in the main thread: its own code handles signals
                loop.add_signal_handler(number, self._stop.set)
