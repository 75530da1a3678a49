"""Everything listed once, and the store made equal to it.

Called by ``app`` when leading begins, after a watch began anew, and now and then: a watch that begins anew does not
tell what was deleted meanwhile; a list does.
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
    """What the operator has no permission to list. It keeps what was known of it."""

    namespaces: frozenset[str] = frozenset()
    kinds: frozenset[str] = frozenset()
    """The kinds that may not be listed in any namespace."""


async def resync(cluster: Cluster, store: Store, *, kinds: Sequence[str], enqueue: Callable[[Key], None]) -> Unlisted:
    """List all kinds; enqueue the keys for which that was news. Raises ``ClusterError``.

    One kind that may not be listed hinders no other one, except LLMDeployments and pods, which every decision needs.
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
    # Only what was known before the list can be missing from it; what came since is newer than the list.
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
    """The same for one kind of children."""
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
    known = {(key, pod.name): pod.uid for key in store.all_keys() for pod in store.pods(key)}

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
    """Have each taken; the namespaces that may not be listed."""
    try:
        async for item in listing:
            take(item)
    except PartlyForbidden as error:
        return error.namespaces
    return frozenset()
