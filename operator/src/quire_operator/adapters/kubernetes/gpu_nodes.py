"""``ports.Nodes``: the labels of the cluster's nodes; nothing else of them is read."""

from quire_operator.adapters.kubernetes.connection import Connection, listed
from quire_operator.domain.status.capacity_check import GPU_MEMORY_LABEL, Labels

_NODES = "/api/v1/nodes"
_PAGE = 500


class GpuNodes:
    """The nodes that report GPU memory. The operator needs the permission to list nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def labels(self) -> tuple[Labels, ...]:
        """See ``ports.Nodes``."""
        query = (("labelSelector", GPU_MEMORY_LABEL),)
        nodes = listed(self._connection.read_metadata, _NODES, query=query, page=_PAGE)
        return tuple([node["metadata"].get("labels") or {} async for node in nodes])
