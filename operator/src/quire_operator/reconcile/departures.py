"""The departure of a deleted LLMDeployment: what outlives it is handed over to its last pods.

``reconciler`` calls it for keys without a resource; ``convergence.departure`` decides.
"""

import logging
from collections.abc import Callable

from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.convergence.departure import departure
from quire_operator.domain.convergence.plan import Delete, Update
from quire_operator.domain.manifests.child_kinds import POLICY
from quire_operator.domain.manifests.cluster_features import ClusterFeatures
from quire_operator.ports import Cluster
from quire_operator.reconcile.store import Store

logger = logging.getLogger(__name__)


class Departures:
    """The departures of all LLMDeployments."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        store: Store,
        enqueue: Callable[[Key], None],
        features: Callable[[], ClusterFeatures],
    ) -> None:
        self._cluster, self._store, self._enqueue, self._features = cluster, store, enqueue, features

    async def depart(self, key: Key) -> None:
        """Hand over what this LLMDeployment left behind; its absence is read first. Raises ``ClusterError``."""
        if self._todo(key) is None:
            return
        latest = await self._cluster.read_resource(key)
        if latest is not None and not latest.deleting:
            self._store.put_resource(latest)
            self._enqueue(key)
            return
        todo = self._todo(key)
        if todo is not None:
            logger.info("%s: %s %s: %s", key, type(todo).__name__.lower(), POLICY.ref(key.name), todo.reason)
        if isinstance(todo, Update):
            self._store.put_child(key, await self._cluster.update(key, todo.manifest))
        elif todo is not None:
            await self._cluster.delete(key, todo.ref, todo.uid)

    def _todo(self, key: Key) -> Update | Delete | None:
        return departure(key, self._store.children(key), self._store.all_pods(key), self._features())
