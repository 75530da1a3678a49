"""``ports.Nodes``: the labels of the cluster's nodes; nothing else of them is read."""

from quire_operator.adapters.kubernetes.connection import Connection, listed
from quire_operator.domain.status.capacity_check import AMD_MEMORY_LABEL, GPU_MEMORY_LABEL, Labels

_NODES = "/api/v1/nodes"
_PAGE = 500


class GpuNodes:
    """The nodes that report GPU memory. The operator needs the permission to list nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def labels(self) -> tuple[Labels, ...]:
        """See ``ports.Nodes``."""
        found: list[Labels] = []
        # A selector cannot ask for one label or another.
        for label in (GPU_MEMORY_LABEL, AMD_MEMORY_LABEL):
            nodes = listed(self._connection.read_metadata, _NODES, query=(("labelSelector", label),), page=_PAGE)
            found += [node["metadata"].get("labels") or {} async for node in nodes]
        return tuple(found)
