"""The resync: list everything once and make the store equal to it.

``app`` runs it when leading starts, after a watch restarted, and at intervals. A watch that restarts does not report
what was deleted in the meantime, and a list does.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from quire_operator.domain.cluster_state.observed import Child, Key, Pod, Ref, Resource
from quire_operator.ports import Cluster, Forbidden, PartlyForbidden
from quire_operator.reconcile.store import Store

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlisted:
    """The objects that the operator has no permission to list; their last known state is kept."""

    namespaces: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    """The kinds that may not be listed in any namespace."""


async def resync(cluster: Cluster, store: Store, *, kinds: Sequence[str], enqueue: Callable[[Key], None]) -> Unlisted:
    """List all kinds and enqueue the keys that changed. Raises ``ClusterError``.

    A kind that may not be listed does not affect others, except LLMDeployments and pods, which every decision needs.
    """
    refused, forbidden = await _resync_resources(cluster, store, enqueue), set()
    for kind in kinds:
        try:
            refused |= await resync_children(cluster, store, kind, enqueue)
        except Forbidden:
            forbidden.add(kind)
    refused |= await _resync_pods(cluster, store, enqueue)
    return Unlisted(namespaces=refused, kinds=frozenset(forbidden))


async def _resync_resources(cluster: Cluster, store: Store, enqueue: Callable[[Key], None]) -> frozenset[str]:
    # Only objects known before the list can be missing from it; later ones are newer than the list.
    known = {key: resource.uid for key in store.live_keys() if (resource := store.resource(key)) is not None}

    def take(resource: Resource) -> None:
        known.pop(resource.key, None)
        if store.put_resource(resource):
            enqueue(resource.key)

    refused = await _each(cluster.list_resources(), take)
    for key, uid in known.items():
        if key.namespace not in refused:
            store.drop_resource(key, uid)
            enqueue(key)
    return refused


async def resync_children(cluster: Cluster, store: Store, kind: str, enqueue: Callable[[Key], None]) -> frozenset[str]:
    """List one kind of children and enqueue the keys that changed. Raises ``ClusterError``."""
    known: dict[tuple[Key, Ref], str] = {}
    for key in store.all_keys():
        known |= {(key, ref): child.uid for ref, child in store.children(key).items() if ref.kind == kind}

    def take(found: tuple[Key, Child]) -> None:
        key, child = found
        known.pop((key, child.ref), None)
        if store.put_child(key, child):
            enqueue(key)

    refused = await _each(cluster.list_children(kind), take)
    for (key, ref), uid in known.items():
        if key.namespace not in refused:
            store.drop_child(key, ref, uid)
            enqueue(key)
    return refused


async def _resync_pods(cluster: Cluster, store: Store, enqueue: Callable[[Key], None]) -> frozenset[str]:
    known = {(key, pod.name): pod.uid for key in store.all_keys() for pod in store.all_pods(key)}

    def take(found: tuple[Key, Pod]) -> None:
        key, pod = found
        known.pop((key, pod.name), None)
        if store.put_pod(key, pod):
            enqueue(key)

    refused = await _each(cluster.list_pods(), take)
    for (key, name), uid in known.items():
        if key.namespace not in refused:
            store.drop_pod(key, name, uid)
            enqueue(key)
    return refused


async def _each(listing: AsyncIterator[T], take: Callable[[T], None]) -> frozenset[str]:
    """Call ``take`` with each item and return the namespaces that may not be listed."""
    try:
        async for item in listing:
            take(item)
    except PartlyForbidden as error:
        return error.namespaces
    return frozenset()
