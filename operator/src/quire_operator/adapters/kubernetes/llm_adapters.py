"""``ports.AdapterObjects`` on a real API server: LLMAdapters, their statuses and Events."""

from collections.abc import AsyncIterator, Mapping

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.domain.cluster_state.observed import Resource
from quire_operator.domain.cluster_state.trimming import trim_adapter
from quire_operator.domain.resource import names
from quire_operator.domain.status.status import Event

_MERGE = "application/merge-patch+json"
_MANAGER = ("fieldManager", names.FIELD_MANAGER)
_ADAPTERS = (f"/apis/{names.API_VERSION}", names.ADAPTER_PLURAL)


class KubeLLMAdapters:
    """The LLMAdapters in the namespaces of a cluster."""

    def __init__(self, cluster: KubeCluster, connection: Connection) -> None:
        self._cluster, self._connection = cluster, connection

    async def list_adapters(self) -> AsyncIterator[Resource]:
        """See ``ports.AdapterObjects``."""
        async for item in self._cluster.list_objects(_ADAPTERS):
            yield trim_adapter(item)

    async def write_adapter_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """See ``ports.AdapterObjects``."""
        return trim_adapter(await self._cluster.write_object_status(_ADAPTERS, names.ADAPTER_KIND, resource, status))

    async def record_event(self, resource: Resource, event: Event) -> None:
        """See ``ports.AdapterObjects``."""
        await self._cluster.record_event(resource, event)

    async def annotate_pod(self, namespace: str, pod: str, digest: str) -> None:
        """See ``ports.AdapterObjects``."""
        patch = {"metadata": {"annotations": {names.ANNOTATION_ADAPTERS: digest}}}
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        await self._connection.write(
            "annotate", "Pod", "PATCH", path, query=(_MANAGER,), body=patch, content_type=_MERGE
        )
