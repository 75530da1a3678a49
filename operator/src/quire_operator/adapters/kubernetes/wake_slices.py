"""``ports.WakeSlices`` on a real API server: the EndpointSlices of wake routes."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from quire_operator.adapters.kubernetes.cluster import KubeCluster
from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.domain.cluster_state.observed import Key
from quire_operator.domain.manifests import wake_route
from quire_operator.domain.manifests.wake_route import WakeRoute
from quire_operator.domain.resource import names
from quire_operator.ports import AppliedRoute, Conflict, NotFound

_APPLY = "application/apply-patch+yaml"
_PREFIX = f"/apis/{wake_route.API_VERSION}"


class KubeWakeSlices:
    """The EndpointSlices of wake routes in the namespaces of a cluster."""

    def __init__(self, cluster: KubeCluster, connection: Connection) -> None:
        self._cluster, self._connection = cluster, connection

    async def list_routes(self) -> AsyncIterator[AppliedRoute]:
        """See ``ports.WakeSlices``."""
        query = ("labelSelector", f"{wake_route.MANAGER_LABEL}={wake_route.MANAGER}")
        async for item in self._cluster.list_objects((_PREFIX, wake_route.PLURAL), query):
            if (route := _applied(item)) is not None:
                yield route

    async def apply_route(self, key: Key, route: WakeRoute, *, force: bool) -> AppliedRoute:
        """See ``ports.WakeSlices``."""
        query = (("fieldManager", names.FIELD_MANAGER), ("force", str(force).lower()))
        written = await self._connection.write(
            "apply",
            wake_route.KIND,
            "PATCH",
            _path(key.namespace, route.name),
            query=query,
            body=route.body,
            content_type=_APPLY,
        )
        applied = _applied(written)
        if applied is None:
            raise Conflict(f"{wake_route.KIND} {route.name} already exists and was not created by quire")
        return applied

    async def delete_route(self, route: AppliedRoute) -> None:
        """See ``ports.WakeSlices``."""
        path = _path(route.key.namespace, f"{route.key.name}{wake_route.SUFFIX}")
        options = {"preconditions": {"uid": route.uid}}
        try:
            await self._connection.write("delete", wake_route.KIND, "DELETE", path, body=options)
        except (NotFound, Conflict):
            return  # it is gone, or another object has its name by now


def _path(namespace: str, name: str) -> str:
    return f"{_PREFIX}/namespaces/{namespace}/{wake_route.PLURAL}/{name}"


def _applied(body: Mapping[str, Any]) -> AppliedRoute | None:
    """Return a slice as a route; None if it has no LLMDeployment as its owner."""
    metadata = body["metadata"]
    for owner in metadata.get("ownerReferences") or ():
        if owner.get("controller") and owner.get("kind") == names.KIND:
            return AppliedRoute(
                key=Key(metadata["namespace"], owner["name"]),
                uid=metadata["uid"],
                version=metadata["resourceVersion"],
                owner_uid=owner["uid"],
            )
    return None
