"""LLMAdapters: what replicas are to serve, and what they report, while this process leads.

The list of an LLMDeployment is a child that its passes apply (``entries``); engines read it again when it changes, so
an adapter restarts no pod. This module polls the engines' reports, writes the statuses of LLMAdapters, and hurries the
kubelets of pods that have not read the newest list yet.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TypeVar

from quire_common.contract import engine
from quire_common.contract.adapters_file import ADAPTERS_PATH, AdapterEntry, AdaptersReport, parse_report
from quire_common.names import url_host
from quire_common.served_names import Claim, NameScope
from quire_operator.autoscaling.scrape import Pages
from quire_operator.deployment.served_names import recorded_adapter_claim
from quire_operator.deployment.store import Cluster
from quire_operator.kube.errors import ClusterError, Conflict, NotFound, NotLeading, PartlyForbidden, Unavailable
from quire_operator.kube.objects import Key, Pod, Resource, is_newer
from quire_operator.lora.placement import Listing, deployment_key, entries_digest, listings
from quire_operator.lora.status import ReplicaReport, adapter_events, adapter_status

_At = TypeVar("_At", Key, str)


class AdapterStore:
    def __init__(self) -> None:
        self._adapters: dict[Key, Resource] = {}
        self._by_deployment: dict[Key, set[Key]] = {}
        self._by_name: dict[str, set[Key]] = {}
        self.is_listed = False
        """True if all were listed at least once: before that, an absent adapter may exist."""

    def uids(self) -> dict[Key, str]:
        return {key: resource.uid for key, resource in self._adapters.items()}

    def get(self, key: Key) -> Resource | None:
        return self._adapters.get(key)

    def deployments(self) -> Collection[Key]:
        """Return the LLMDeployments that LLMAdapters name, which need not exist."""
        return list(self._by_deployment)

    def of(self, deployment: Key) -> Sequence[Resource]:
        """Return the LLMAdapters that name an LLMDeployment, by name."""
        return [self._adapters[key] for key in sorted(self._by_deployment.get(deployment, ()), key=str)]

    def claims(self, served_name: str) -> tuple[Claim, ...]:
        """Return the recorded claims of LLMAdapters to a served name."""
        found = (recorded_adapter_claim(self._adapters[key]) for key in self._by_name.get(served_name, ()))
        return tuple(claim for claim in found if claim is not None)

    def put(self, resource: Resource) -> bool:
        """Store an LLMAdapter and return True if it is newer than the stored one."""
        old = self._adapters.get(resource.key)
        if old is not None and not is_newer(resource.version, old.version):
            return False
        if old is not None:
            self._remove(old)
        self._adapters[resource.key] = resource
        self._by_deployment.setdefault(deployment_key(resource), set()).add(resource.key)
        if (claim := recorded_adapter_claim(resource)) is not None:
            self._by_name.setdefault(claim.name, set()).add(resource.key)
        return True

    def drop(self, key: Key, uid: str) -> None:
        """Remove a deleted LLMAdapter; a newer one with the same name stays."""
        old = self._adapters.get(key)
        if old is not None and old.uid == uid:
            self._remove(old)

    def _remove(self, resource: Resource) -> None:
        del self._adapters[resource.key]
        claim = recorded_adapter_claim(resource)
        _discard(self._by_deployment, deployment_key(resource), resource.key)
        if claim is not None:
            _discard(self._by_name, claim.name, resource.key)


def _discard(index: dict[_At, set[Key]], at: _At, key: Key) -> None:
    keys = index[at]
    keys.discard(key)
    if not keys:
        del index[at]


logger = logging.getLogger(__name__)

_PERIOD_SECONDS = 5.0
_SETTLE_SECONDS = 0.2
_AT_ONCE = 32
"""Reports that are read at the same time."""


class Adapters:
    def __init__(self, cluster: Cluster, *, reader: Pages, scope: Callable[[], NameScope | None]) -> None:
        self._kube, self._store, self._clock = cluster.kube, cluster.store, cluster.clock
        self._enqueue = cluster.enqueue
        self._adapters, self._reader, self._scope = AdapterStore(), reader, scope
        self._due = asyncio.Event()
        self._listed: dict[Key, tuple[AdapterEntry, ...]] = {}
        self._claimed: dict[Key, Claim] = {}
        self._hurried: dict[str, str] = {}
        """The digest of the list that a pod was hurried to read, by the pod's uid."""
        self._reading = asyncio.Semaphore(_AT_ONCE)

    # --- what replicas are to serve ---

    def entries(self, key: Key) -> tuple[AdapterEntry, ...]:
        """Return the adapters of an LLMDeployment. Raise ``Unavailable`` until all LLMAdapters are known.

        Engines unload what a list does not have, so an incomplete list must not be written.
        """
        if not self._adapters.is_listed:
            raise Unavailable("the LLMAdapters are not listed yet")
        return tuple(each.entry for each in self._listings(key) if each.entry is not None)

    def _listings(self, key: Key) -> tuple[Listing, ...]:
        return listings(
            self._adapters.of(key), self._store.resource(key), self._claims, scope=self._scope(), now=self._clock()
        )

    def preview(self, resource: Resource) -> Listing | None:
        """Return the decision about an LLMAdapter that is about to be stored.

        Return None if it is being deleted, or if this process has not listed all objects: a standby has not.
        """
        if not self._adapters.is_listed:
            return None
        key = deployment_key(resource)
        others = [other for other in self._adapters.of(key) if other.key != resource.key]
        found = listings(
            [*others, resource], self._store.resource(key), self._claims, scope=self._scope(), now=self._clock()
        )
        return next((listing for listing in found if listing.resource is resource), None)

    def claims(self, served_name: str) -> tuple[Claim, ...]:
        return self._adapters.claims(served_name)

    def _claims(self, served_name: str) -> Sequence[Claim]:
        return (*self._store.claims(served_name), *self._adapters.claims(served_name))

    def changed(self, key: Key) -> None:
        """Look after the adapters of an LLMDeployment soon, and have its list renewed."""
        self._enqueue(key)
        self._due.set()

    async def resync(self) -> None:
        """List all LLMAdapters. Raise ``ClusterError``; a cluster without the kind has none."""
        known, refused = self._adapters.uids(), frozenset[str]()
        try:
            async for resource in self._kube.list_adapters():
                known.pop(resource.key, None)
                if self._adapters.put(resource):
                    self.changed(deployment_key(resource))
        except NotFound:
            logger.warning("this cluster has no kind LLMAdapter: apply crds/llmadapters.yaml to serve adapters")
        except PartlyForbidden as error:
            refused = error.namespaces
        for key, uid in known.items():
            if key.namespace not in refused:
                self.drop(key, uid)
        self._adapters.is_listed = True

    def put(self, resource: Resource) -> None:
        """Note an LLMAdapter that a watch has shown."""
        if self._adapters.put(resource):
            self.changed(deployment_key(resource))

    def drop(self, key: Key, uid: str) -> None:
        """Note that an LLMAdapter was deleted."""
        old = self._adapters.get(key)
        self._adapters.drop(key, uid)
        if old is not None:
            self.changed(deployment_key(old))

    # --- what they report ---

    async def follow(self) -> None:
        self._listed, self._claimed, self._hurried = {}, {}, {}
        while True:
            await self.poll()
            with suppress(TimeoutError):
                async with asyncio.timeout(_PERIOD_SECONDS):
                    await self._due.wait()
                    await asyncio.sleep(_SETTLE_SECONDS)  # many may be applied at once
            self._due.clear()

    async def poll(self) -> None:
        """Read the reports of all replicas with adapters once, and write what changed."""
        if not self._adapters.is_listed:
            return
        for key in self._adapters.deployments():
            try:
                await self._poll_deployment(key)
            except NotLeading:
                return
            except ClusterError as error:
                logger.warning("%s: the status of its adapters was not written: %s", key, error)
        for key in self._claimed.keys() - self._adapters.uids().keys():
            self._release(self._claimed.pop(key))
        self._listed = {key: found for key, found in self._listed.items() if key in self._adapters.deployments()}
        uids = {pod.uid for key in self._listed for pod in self._store.pods(key)}
        self._hurried = {uid: digest for uid, digest in self._hurried.items() if uid in uids}

    async def _poll_deployment(self, key: Key) -> None:
        found = self._listings(key)
        entries = tuple(each.entry for each in found if each.entry is not None)
        if self._listed.get(key) != entries:
            self._listed[key] = entries
            self._enqueue(key)  # a name that has become free, for example, is no event of this LLMDeployment
        pods = [pod for pod in self._store.pods(key) if pod.ready and pod.ip and not pod.deleting]
        reports = dict(zip(pods, await asyncio.gather(*map(self._report, pods)), strict=True)) if entries else {}
        for listing in found:
            replicas = [_replica_report(pod, report, listing.entry) for pod, report in reports.items()]
            await self._write(listing, replicas if listing.entry is not None else [])
        for pod, report in reports.items():
            await self._hurry(key, pod, report, entries)

    async def _report(self, pod: Pod) -> AdaptersReport | None:
        async with self._reading:
            answer = await self._reader.answer(f"http://{url_host(pod.ip)}:{engine.HTTP_PORT}{ADAPTERS_PATH}")
        try:
            return None if answer is None else parse_report(json.loads(answer))
        except (ValueError, RecursionError):  # users choose the image that answers
            return None

    async def _write(self, listing: Listing, replicas: Sequence[ReplicaReport]) -> None:
        resource = listing.resource
        deployment = self._store.resource(deployment_key(resource))
        asked = None if deployment is None else deployment.status.get("desiredReplicas")
        wanted = adapter_status(
            listing, replicas, desired_replicas=asked if isinstance(asked, int) else None, now=self._clock()
        )
        if wanted != resource.status:
            try:
                written = await self._kube.write_adapter_status(resource, wanted)
            except (Conflict, NotFound):
                self._due.set()  # it has changed or is gone; the watch shows how
                return
            self._adapters.put(written)
            for event in adapter_events(resource.status, wanted):
                await self._kube.record_event(written, event)
        self._claim(resource.key, listing.claim)

    def _claim(self, key: Key, claim: Claim) -> None:
        before = self._claimed.get(key)
        self._claimed[key] = claim
        for each in {claim, before} if claim != before else ():
            if each is not None:
                self._release(each)

    def _release(self, claim: Claim) -> None:
        """Have the LLMDeployments that a claim may affect checked again."""
        for other in self._store.claims(claim.name):
            self._enqueue(Key(other.namespace, other.deployment))

    async def _hurry(
        self, key: Key, pod: Pod, report: AdaptersReport | None, entries: tuple[AdapterEntry, ...]
    ) -> None:
        """Change an annotation of a pod whose engine has an older list: the kubelet then renews the file at once."""
        if report is None or _known(report) == {(entry.name, entry.generation) for entry in entries}:
            return
        digest = entries_digest(entries)
        if self._hurried.get(pod.uid) == digest:
            return
        with suppress(NotFound):  # it is gone
            await self._kube.annotate_pod(key.namespace, pod.name, digest)
        self._hurried[pod.uid] = digest


def _known(report: AdaptersReport) -> set[tuple[str, int]]:
    return {(adapter.name, adapter.generation) for adapter in report.adapters}


def _replica_report(pod: Pod, report: AdaptersReport | None, entry: AdapterEntry | None) -> ReplicaReport:
    known = () if report is None else report.adapters
    same = (adapter for adapter in known if entry is not None and adapter.name == entry.name)
    adapter = next((adapter for adapter in same if entry is not None and adapter.generation == entry.generation), None)
    return ReplicaReport(replica=pod.name, answered=report is not None, adapter=adapter)
