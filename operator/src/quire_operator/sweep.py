"""Everything listed once, and the store made equal to it.

Called by ``app`` when leading begins, after a watch began anew, and now and then: a watch that begins anew does not
tell what was deleted meanwhile; a list does.
"""

from collections.abc import Callable, Sequence

from quire_operator.domain.observed import Key, Ref
from quire_operator.ports import Cluster
from quire_operator.store import Store


async def sweep(cluster: Cluster, store: Store, *, kinds: Sequence[str], enqueue: Callable[[Key], None]) -> None:
    """List all kinds; enqueue the keys for which that was news. Raises ``ClusterError``."""
    await _sweep_resources(cluster, store, enqueue)
    for kind in kinds:
        await sweep_children(cluster, store, kind, enqueue)
    await _sweep_pods(cluster, store, enqueue)


async def _sweep_resources(cluster: Cluster, store: Store, enqueue: Callable[[Key], None]) -> None:
    # Only what was known before the list can be missing from it; what came since is newer than the list.
    known = {key: resource.uid for key in store.live_keys() if (resource := store.resource(key)) is not None}
    async for resource in cluster.list_resources():
        known.pop(resource.key, None)
        if store.put_resource(resource):
            enqueue(resource.key)
    for key, uid in known.items():
        store.drop_resource(key, uid)
        enqueue(key)


async def sweep_children(cluster: Cluster, store: Store, kind: str, enqueue: Callable[[Key], None]) -> None:
    """The same for one kind of children."""
    known: dict[tuple[Key, Ref], str] = {}
    for key in store.all_keys():
        known |= {(key, ref): child.uid for ref, child in store.children(key).items() if ref.kind == kind}
    async for key, child in cluster.list_children(kind):
        known.pop((key, child.ref), None)
        if store.put_child(key, child):
            enqueue(key)
    for (key, ref), uid in known.items():
        store.drop_child(key, ref, uid)
        enqueue(key)


async def _sweep_pods(cluster: Cluster, store: Store, enqueue: Callable[[Key], None]) -> None:
    known = {(key, pod.name): pod.uid for key in store.all_keys() for pod in store.pods(key)}
    async for key, pod in cluster.list_pods():
        known.pop((key, pod.name), None)
        if store.put_pod(key, pod):
            enqueue(key)
    for (key, name), uid in known.items():
        store.drop_pod(key, name, uid)
        enqueue(key)
