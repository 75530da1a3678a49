"""``ports.DryRun`` on a real API server. Its writes store nothing and pass no fence, so a standby reviews as well."""

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.domain.cluster_state.observed import Key, Ref
from quire_operator.domain.convergence.plan import is_adoptable
from quire_operator.domain.manifests.objects import Manifest


class KubeDryRun:
    """Dry runs over a connection without a fence."""

    def __init__(self, connection: Connection) -> None:
        self._cluster = KubeCluster(connection, namespaces=())

    async def owner(self, key: Key, ref: Ref) -> str | None:
        """See ``ports.DryRun``."""
        child = await self._cluster.read_child(key, ref)
        if child is None or is_adoptable(child):
            return None
        return "" if child.owner is None else child.owner.uid

    async def apply(self, key: Key, manifest: Manifest) -> None:
        """See ``ports.DryRun``."""
        await self._cluster.check_template(key, manifest)
