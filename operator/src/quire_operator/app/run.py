"""The operator's process: it builds its parts, runs them in one event loop and stops them in order.

``__main__`` calls ``run``. The watches always run, so that a standby knows the cluster when it takes over. The parts
that write run only while this process leads.
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

from quire_common.served_names import Claim
from quire_operator.adapters.hub_facts import HubFacts
from quire_operator.adapters.kubernetes.cluster import WAKE_SLICES, KubeCluster
from quire_operator.adapters.kubernetes.connection import (
    Checkpoint,
    Connection,
    credentials,
    load_configuration,
    own_namespace,
)
from quire_operator.adapters.kubernetes.dry_run import KubeDryRun
from quire_operator.adapters.kubernetes.gateway_pods import GatewayPods
from quire_operator.adapters.kubernetes.gpu_nodes import GpuNodes
from quire_operator.adapters.kubernetes.leases import KubeLeases
from quire_operator.adapters.kubernetes.llm_adapters import KubeLLMAdapters
from quire_operator.adapters.metrics.download_progress import DownloadProgress
from quire_operator.adapters.metrics.gateways import Gateways
from quire_operator.adapters.wall_clock import WallClock
from quire_operator.app.autoscaling import LeadingAutoscaler
from quire_operator.app.relisting import Relisting
from quire_operator.app.resource_metrics import ResourceMetrics
from quire_operator.app.settings import Settings
from quire_operator.app.telemetry import Server, Telemetry
from quire_operator.app.watching import Watching
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.errors import ClusterProblem
from quire_operator.handlers.events import Inbox, Login, Webhook
from quire_operator.leadership.leader import Elector
from quire_operator.leadership.write_fence import WriteFence
from quire_operator.ports import ClusterError, Forbidden, NotLeading
from quire_operator.reconcile.adapter_admission import AdapterReviewer
from quire_operator.reconcile.adapter_store import AdapterStore
from quire_operator.reconcile.adapters import Adapters
from quire_operator.reconcile.admission import Reviewer
from quire_operator.reconcile.canaries import PERIOD_SECONDS, Canaries
from quire_operator.reconcile.capacity_check import CapacityCheck
from quire_operator.reconcile.downloads import Downloads
from quire_operator.reconcile.hub_reader import HubReader
from quire_operator.reconcile.model_revisions import ModelRevisions
from quire_operator.reconcile.optional_kinds import OptionalKinds
from quire_operator.reconcile.reconciler import Reconciler, retry_after
from quire_operator.reconcile.store import Store
from quire_operator.reconcile.workqueue import Workers

logger = logging.getLogger(__name__)

_GRACE_SECONDS, _RETRY_SECONDS = 2.0, 10.0
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
        reviewer = Reviewer(dry_run=KubeDryRun(review_connection), images=settings.images, capacity=operator.capacity)
        await operator.run(lambda: credentials(configuration), webhook=_webhook(settings, reviewer, operator.adapters))
    finally:
        await connection.close()
        await lease_connection.close()
        await review_connection.close()


def _webhook(settings: Settings, reviewer: Reviewer, adapters: Adapters) -> Webhook | None:
    options = settings.webhook
    if options is None:
        return None
    return Webhook(
        host=settings.host,
        port=options.port,
        certificate=options.certificate,
        key=options.key,
        client_ca=options.client_ca,
        judge=reviewer.review,
        judge_adapter=AdapterReviewer(adapters.preview).review,
    )


class Operator:
    """The parts of one operator process."""

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
        self._cluster = KubeCluster(connection, namespaces=settings.watch_namespaces)
        self._store, self._clock = Store(), WallClock()
        self._workers: Workers[Key] = Workers(
            self._reconcile,
            on_error=self._on_error,
            now=time.monotonic,
            random=random.random,
            limit=settings.workers,
        )
        # Without the capacity check, the operator sends no requests to the hub.
        self._hub = self._make_hub_reader() if settings.capacity_check else None
        self.capacity = None if self._hub is None else self._make_capacity_check(connection, self._hub)
        self._optional_kinds = OptionalKinds(cluster=self._cluster, store=self._store, enqueue=self._workers.add)
        self._progress = DownloadProgress()
        self._downloads = Downloads(
            store=self._store, reader=self._progress, clock=self._clock, enqueue=self._workers.add
        )
        self._canaries = Canaries(
            store=self._store,
            enqueue=self._workers.add,
            period_seconds=min(PERIOD_SECONDS, settings.autoscaling_period_seconds),
        )
        adapter_store = AdapterStore()
        self.adapters = self._make_adapters(connection, adapter_store)
        self._reconciler = self._make_reconciler(adapter_store.claims)
        self._gateways = GatewayPods(
            lambda path, query: connection.read(path, query=query),
            namespace=self._namespace,
            selector=settings.gateways.selector,
            urls=settings.gateways.urls,
        )
        self._leases = KubeLeases(lease_connection, namespace=self._namespace, name=settings.lease_name)
        self._elector = Elector(
            leases=self._leases, identity=settings.identity, fence=fence, lead=self._lead, seen=self._lease_called
        )
        self._autoscaler = LeadingAutoscaler(
            settings,
            telemetry,
            store=self._store,
            clock=self._clock,
            reconciler=self._reconciler,
            gateways=self._gateways.addresses,
        )
        self._relisting = self._make_relisting()
        self._stop = asyncio.Event()
        self._watching = self._make_watching()

    def _make_adapters(self, connection: Connection, adapter_store: AdapterStore) -> Adapters:
        return Adapters(
            objects=KubeLLMAdapters(self._cluster, connection),
            adapters=adapter_store,
            store=self._store,
            reader=self._progress,
            clock=self._clock,
            enqueue=self._workers.add,
            scope=lambda: self._settings.children.features.served_names,
        )

    def _make_relisting(self) -> Relisting:
        return Relisting(
            cluster=self._cluster,
            store=self._store,
            workers=self._workers,
            adapters=self.adapters.resync,
            period_seconds=self._settings.resync_seconds,
            reported=self._telemetry.unlisted,
        )

    def _make_reconciler(self, adapter_claims: Callable[[str], Sequence[Claim]]) -> Reconciler:
        return Reconciler(
            cluster=self._cluster,
            store=self._store,
            clock=self._clock,
            images=self._settings.images,
            enqueue=self._workers.add,
            cluster_domain=self._settings.cluster_domain,
            features=self._features,
            capacity=self.capacity,
            download=self._downloads.progress,
            canaries=self._canaries,
            max_concurrent_rollouts=self._settings.max_concurrent_rollouts,
            revisions=ModelRevisions(self._hub),
            adapters=self.adapters.entries,
            adapter_claims=adapter_claims,
        )

    def _make_watching(self) -> Watching:
        return Watching(
            inbox=Inbox(
                store=self._store,
                adapters=self.adapters,
                namespaces=frozenset(self._settings.watch_namespaces),
                enqueue=self._workers.add,
                relisted=self._relisting.request,
                lease_seen=self._lease_seen,
            ),
            cluster=self._cluster,
            namespace=self._namespace,
            lease_name=self._settings.lease_name,
            started=self._catch_signals,  # kopf has just put its own handlers there
        )

    def _make_hub_reader(self) -> HubReader:
        endpoint = self._settings.images.hub_endpoint or os.environ.get("HF_ENDPOINT")
        return HubReader(HubFacts(endpoint), now=time.monotonic)

    def _make_capacity_check(self, connection: Connection, hub: HubReader) -> CapacityCheck:
        everywhere = not self._settings.watch_namespaces  # otherwise it may not list nodes
        return CapacityCheck(
            hub=hub,
            nodes=GpuNodes(connection) if everywhere else None,
            now=time.monotonic,
            enqueue=self._workers.add,
        )

    async def run(self, login: Login, *, webhook: Webhook | None = None) -> None:
        """Run until stopped, then release the Lease so that a standby can lead at once."""
        resources = ResourceMetrics(self._store, leading=self._fence.is_open)
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
            await self._progress.aclose()
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
        for key in self._store.all_keys():
            self._workers.add(key)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._workers.run(grace_seconds=_GRACE_SECONDS))
            group.create_task(self._relisting.repeat())
            group.create_task(self._optional_kinds.follow(self._settings.children.discovery_seconds))
            group.create_task(self._autoscaler.run())
            group.create_task(self._downloads.follow())
            group.create_task(self.adapters.follow())
            group.create_task(self._follow_canaries())
            group.create_task(self._delete_wake_slices())

    async def _delete_wake_slices(self) -> None:
        """Delete the EndpointSlices of earlier versions once: with them, some requests to a Service find no replica."""
        while True:
            try:
                await self._cluster.delete_wake_slices()
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
        return replace(self._settings.children.features, served_kinds=self._optional_kinds.served)

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
