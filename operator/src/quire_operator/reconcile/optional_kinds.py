"""The optional kinds, which a cluster may lack, get and lose: discovered at intervals while leading.

``app`` runs it. kopf does not watch these kinds, because a watch of a kind that disappears ends all other watches.
Their objects are few and change seldom, so each refresh lists them. The operator's own writes update the store at once.
"""

import asyncio
import logging
import random
from collections.abc import Callable

from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.manifests.child_kinds import OPTIONAL_KINDS
from quire_operator.ports import Cluster, ClusterError, Forbidden, NotFound
from quire_operator.reconcile.log_once import LogOnce
from quire_operator.reconcile.resync import resync_children
from quire_operator.reconcile.store import Store

logger = logging.getLogger(__name__)


class OptionalKinds:
    """The optional kinds. ``served`` contains those that the last refresh found."""

    def __init__(self, *, cluster: Cluster, store: Store, enqueue: Callable[[Key], None]) -> None:
        self._cluster, self._store, self._enqueue = cluster, store, enqueue
        self.served: frozenset[str] = frozenset()
        self._problems = LogOnce(logger)

    async def follow(self, period_seconds: float) -> None:
        """Discover and list them at intervals, until cancelled."""
        while True:
            await asyncio.sleep(period_seconds * random.uniform(0.9, 1.1))
            await self.refresh()

    async def refresh(self) -> None:
        """Discover and list the optional kinds. It never raises: after an error the earlier result stays."""
        try:
            found = await self._cluster.served_kinds()
            served = frozenset([kind for kind in sorted(found) if await self._listed(kind)])
        except ClusterError as error:
            self._problems.warning(f"could not look for {', '.join(sorted(OPTIONAL_KINDS))}: {error}")
            return
        if served == found:
            self._problems.reset()
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
            self._enqueue(key)

    async def _listed(self, kind: str) -> bool:
        """Return True if the objects of a kind could be listed, and store them."""
        try:
            await resync_children(self._cluster, self._store, kind, self._enqueue)
        except NotFound:
            return False  # it was removed between the two requests
        except Forbidden as error:
            self._problems.warning(
                f"the cluster has {kind}s, but the operator may not create any: {error}; check its role"
            )
            return False
        return True

    def _forget(self, kind: str) -> None:
        for key in self._store.all_keys():
            for ref, child in self._store.children(key).items():
                if ref.kind == kind:
                    self._store.drop_child(key, ref, child.uid)
