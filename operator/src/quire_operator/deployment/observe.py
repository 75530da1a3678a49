"""The observation of the cluster: the children of a pass, and lists of everything.

Everything is listed when leading starts, after a watch restarted, and at intervals. A watch that restarts does not
report what was deleted in the meantime, and a list does. kopf does not watch the optional kinds, because a watch of a
kind that disappears ends all other watches. Their objects are few and change seldom, so they are listed at intervals.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire_operator.api import Spec
from quire_operator.canary.manifests import WATCHED_KINDS
from quire_operator.deployment.desired import OPTIONAL_KINDS, child_refs
from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.deployment.store import Cluster, Store
from quire_operator.deployment.workqueue import Workers
from quire_operator.kube.errors import ClusterError, Forbidden, NotFound, PartlyForbidden
from quire_operator.kube.objects import LEADER_WORKER_SET, Child, Key, Ref

logger = logging.getLogger(__name__)

T = TypeVar("T")
N = TypeVar("N")


async def observed_children(
    cluster: Cluster, key: Key, spec: Spec, features: ClusterFeatures, *, is_unread: bool
) -> Mapping[Ref, Child]:
    """Return the stored children and those that no watch shows.

    No watch shows objects without our label, objects of other owners, those just created, and LeaderWorkerSets. If
    ``is_unread``, only the latter are read.
    """
    children = dict(cluster.store.children(key))
    for ref in child_refs(spec, features):
        known = children.get(ref)
        if (known is not None or is_unread) and ref.kind != LEADER_WORKER_SET:
            continue
        try:
            child = await cluster.kube.read_child(key, ref)
        except Forbidden:
            continue  # it may not be created either, which the executor reports
        if child is not None:
            children[ref] = child.after(known)
        if ref.kind == LEADER_WORKER_SET:
            # Optional kinds are listed at long intervals, and pods show that this one has changed.
            _remember(cluster.store, key, known, child)
            if child is None:
                children.pop(ref, None)
    return children


def _remember(store: Store, key: Key, known: Child | None, child: Child | None) -> None:
    """Store a child that was read, or that it is gone."""
    if child is not None and child.owner is not None and child.owner.name == key.name:
        store.put_child(key, child)
    elif child is None and known is not None:
        store.drop_child(key, known.ref, known.uid)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """The objects that the operator has no permission to list; their last known state is kept."""

    namespaces: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    """The kinds that may not be listed in any namespace."""


async def resync(cluster: Cluster, kinds: Sequence[str]) -> Unlisted:
    """List everything, make the store equal to it, and enqueue the keys that changed. Raises ``ClusterError``.

    A kind that may not be listed does not affect others, except LLMDeployments and pods, which every decision needs.
    """
    refused, forbidden = await _resync_resources(cluster), set()
    for kind in kinds:
        try:
            refused |= await resync_children(cluster, kind)
        except Forbidden:
            forbidden.add(kind)
    refused |= await _resync_pods(cluster)
    return Unlisted(namespaces=refused, kinds=frozenset(forbidden))


async def _resync_resources(cluster: Cluster) -> frozenset[str]:
    store = cluster.store
    known = {(key, ""): resource.uid for key in store.live_keys() if (resource := store.resource(key)) is not None}
    return await _equalize(
        cluster,
        cluster.kube.list_resources(),
        known,
        place=lambda resource: (resource.key, ""),
        put=store.put_resource,
        drop=lambda key, _, uid: store.drop_resource(key, uid),
    )


async def resync_children(cluster: Cluster, kind: str) -> frozenset[str]:
    """List one kind of children and enqueue the keys that changed. Raises ``ClusterError``."""
    store, known = cluster.store, dict[tuple[Key, Ref], str]()
    for key in store.all_keys():
        known |= {(key, ref): child.uid for ref, child in store.children(key).items() if ref.kind == kind}
    return await _equalize(
        cluster,
        cluster.kube.list_children(kind),
        known,
        place=lambda found: (found[0], found[1].ref),
        put=lambda found: store.put_child(*found),
        drop=store.drop_child,
    )


async def _resync_pods(cluster: Cluster) -> frozenset[str]:
    store = cluster.store
    known = {(key, pod.name): pod.uid for key in store.all_keys() for pod in store.all_pods(key)}
    return await _equalize(
        cluster,
        cluster.kube.list_pods(),
        known,
        place=lambda found: (found[0], found[1].name),
        put=lambda found: store.put_pod(*found),
        drop=store.drop_pod,
    )


async def _equalize(
    cluster: Cluster,
    listing: AsyncIterator[T],
    known: dict[tuple[Key, N], str],
    *,
    place: Callable[[T], tuple[Key, N]],
    put: Callable[[T], bool],
    drop: Callable[[Key, N, str], None],
) -> frozenset[str]:
    """Make the store equal to a list, and return the namespaces that may not be listed.

    ``known`` are the uids of what was stored before the list: only that can be missing from it, because later objects
    are newer than the list.
    """
    refused = frozenset[str]()
    try:
        async for item in listing:
            at = place(item)
            known.pop(at, None)
            if put(item):
                cluster.enqueue(at[0])
    except PartlyForbidden as error:
        refused = error.namespaces
    for (key, name), uid in known.items():
        if key.namespace not in refused:
            drop(key, name, uid)
            cluster.enqueue(key)
    return refused


class OptionalKinds:
    """The optional kinds. ``served`` contains those that the last refresh found."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster, self._store = cluster, cluster.store
        self.served: frozenset[str] = frozenset()
        self._problem = ""
        """The last warning, which is not repeated until another one follows or the cause is gone."""

    async def follow(self, period_seconds: float) -> None:
        """Discover and list them at intervals, until cancelled."""
        while True:
            await asyncio.sleep(period_seconds * random.uniform(0.9, 1.1))
            await self.refresh()

    async def refresh(self) -> None:
        """Discover and list the optional kinds. It never raises: after an error the earlier result stays."""
        try:
            found = await self._cluster.kube.served_kinds()
            served = frozenset([kind for kind in sorted(found) if await self._listed(kind)])
        except ClusterError as error:
            self._warn(f"could not look for {', '.join(sorted(OPTIONAL_KINDS))}: {error}")
            return
        if served == found:
            self._problem = ""
        for kind in OPTIONAL_KINDS - served:
            self._forget(kind)
        if served == self.served:
            return
        logger.info(
            "optional kinds in this cluster: %s",
            ", ".join(sorted(served)) or f"none of {', '.join(sorted(OPTIONAL_KINDS))}",
        )
        self.served = served
        for key in self._store.live_keys():
            self._cluster.enqueue(key)

    async def _listed(self, kind: str) -> bool:
        """Return True if the objects of a kind could be listed, and store them."""
        try:
            await resync_children(self._cluster, kind)
        except NotFound:
            return False  # it was removed between the two requests
        except Forbidden as error:
            self._warn(f"the cluster has {kind}s, but the operator may not create any: {error}; check its role")
            return False
        return True

    def _warn(self, problem: str) -> None:
        if problem != self._problem:
            logger.warning("%s", problem)
            self._problem = problem

    def _forget(self, kind: str) -> None:
        for key in self._store.all_keys():
            for ref, child in self._store.children(key).items():
                if ref.kind == kind:
                    self._store.drop_child(key, ref, child.uid)


_RETRY_SECONDS = 2.0
_SETTLE_SECONDS = 2.0
_JITTER_SECONDS = 30.0


class Relisting:
    """The lists of all objects that the operator watches."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        workers: Workers[Key],
        adapters: Callable[[], Awaitable[None]],
        period_seconds: float,
        reported: Callable[[frozenset[str]], None],
    ) -> None:
        """``adapters`` lists the LLMAdapters; ``reported`` is given the kinds that may not be listed."""
        self._cluster, self._workers, self._adapters = cluster, workers, adapters
        self._period_seconds, self._reported = period_seconds, reported
        self._requested = asyncio.Event()
        self._unlisted = Unlisted()

    @property
    def unlisted_kinds(self) -> frozenset[str]:
        """The kinds that the last list had no permission for."""
        return self._unlisted.kinds

    def request(self) -> None:
        """Have everything listed soon, because a watch restarted."""
        self._requested.set()

    async def repeat(self) -> None:
        """List at intervals and on request, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._period_seconds * random.uniform(0.9, 1.1)):
                    await self._requested.wait()
            except TimeoutError:
                await self.once()
                for key in self._cluster.store.live_keys():
                    self._workers.add_after(key, random.uniform(0, min(_JITTER_SECONDS, self._period_seconds / 2)))
            else:
                await asyncio.sleep(_SETTLE_SECONDS)
                self._requested.clear()
                await self.once()

    async def once(self) -> None:
        """List everything, and try again until the API server answers."""
        while True:
            try:
                kinds = tuple(WATCHED_KINDS)
                self._report(await resync(self._cluster, kinds))
                await self._list_adapters()
                return
            except ClusterError as error:
                logger.warning("listing failed: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)

    async def _list_adapters(self) -> None:
        """List the LLMAdapters. Without the permission, only LLMDeployments with adapters wait."""
        try:
            await self._adapters()
        except Forbidden as error:
            logger.error("no permission to list LLMAdapters: check the operator's role: %s", error)

    def _report(self, unlisted: Unlisted) -> None:
        namespaces = unlisted.namespaces
        if unlisted.kinds and unlisted.kinds != self._unlisted.kinds:
            logger.error(
                "no permission to list %s; these objects are not repaired: check the operator's role",
                ", ".join(sorted(unlisted.kinds)),
            )
        if namespaces and namespaces != self._unlisted.namespaces:
            logger.warning(
                "no permission to list in %s, which is skipped: if the namespace is gone, remove it from "
                "--watch-namespace (the chart's watchNamespaces); otherwise check the operator's role there",
                ", ".join(sorted(namespaces)),
            )
        self._unlisted = unlisted
        self._reported(unlisted.kinds)
