"""The observed children of a pass: those that the watches show, and those that only a read shows."""

from collections.abc import Mapping

from quire_operator.domain.cluster_state.observed import LEADER_WORKER_SET, Child, Key, Ref
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.domain.manifests.desired import child_refs
from quire_operator.domain.resource import Spec
from quire_operator.ports import Cluster, Forbidden
from quire_operator.reconcile.store import Store


async def observed_children(
    cluster: Cluster, store: Store, key: Key, spec: Spec, features: ClusterFeatures, *, is_unread: bool
) -> Mapping[Ref, Child]:
    """Return the stored children and those that no watch shows.

    No watch shows objects without our label, objects of other owners, those just created, and LeaderWorkerSets. If
    ``is_unread``, only the latter are read.
    """
    children = dict(store.children(key))
    for ref in child_refs(spec, features):
        known = children.get(ref)
        if (known is not None or is_unread) and ref.kind != LEADER_WORKER_SET:
            continue
        try:
            child = await cluster.read_child(key, ref)
        except Forbidden:
            continue  # it may not be created either, which the executor reports
        if child is not None:
            children[ref] = child.after(known)
        if ref.kind == LEADER_WORKER_SET:
            # Optional kinds are listed at long intervals, and pods show that this one has changed.
            _remember(store, key, known, child)
            if child is None:
                children.pop(ref, None)
    return children


def _remember(store: Store, key: Key, known: Child | None, child: Child | None) -> None:
    """Store a child that was read, or that it is gone."""
    if child is not None and child.owner is not None and child.owner.name == key.name:
        store.put_child(key, child)
    elif child is None and known is not None:
        store.drop_child(key, known.ref, known.uid)
