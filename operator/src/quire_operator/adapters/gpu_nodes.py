"""``ports.Nodes``: the labels of the cluster's nodes, listed now and then; nothing else of them is asked for."""

from quire_operator.adapters.kube_connection import Connection
from quire_operator.domain.capacity_check import GPU_MEMORY_LABEL, Labels

_NODES = "/api/v1/nodes"
_PAGE = "500"


class GpuNodes:
    """Needs the right to list nodes."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def labels(self) -> tuple[Labels, ...]:
        """See ``ports.Nodes``."""
        found: list[Labels] = []
        token = ""
        while True:
            query = (("labelSelector", GPU_MEMORY_LABEL), ("limit", _PAGE), ("continue", token))
            page = await self._connection.read_metadata(_NODES, query=query)
            found += [node["metadata"].get("labels") or {} for node in page.get("items") or []]
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return tuple(found)
