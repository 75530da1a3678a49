"""The check whether the API server accepts pods with image volumes, by a dry run of the Deployment that would have one.

For ``cluster``. A server that has image volumes may have them turned off, and then accepts the pod and silently drops
the volume: only the answer shows it. It does not show whether the container runtime of each node mounts them: a pod
whose runtime cannot reports that itself.

The trial is the Deployment itself, so that policies check the same object as later. A rejection by a policy or a quota
of one namespace says nothing about other namespaces and is not cached.
"""

from collections.abc import Mapping
from typing import Any

from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.domain.resource import names
from quire_operator.ports import Refused

_UNKNOWN_FIELD = "image: field not declared in schema"
"""The answer of an API server that is too old to know the field."""


class ImageVolumes:
    """The answer of the API server, which is requested until it is yes: an upgrade may turn image volumes on."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._supported = False

    async def supported(self, namespace: str, deployment: Mapping[str, Any]) -> bool:
        """Return whether the server keeps the image volume of this Deployment. Raises ``ClusterError``.

        This requires the permission to create Deployments in the namespace.
        """
        if not self._supported:
            self._supported = await self._try(namespace, deployment)
        return self._supported

    async def _try(self, namespace: str, deployment: Mapping[str, Any]) -> bool:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{deployment['metadata']['name']}"
        query = (("fieldManager", names.FIELD_MANAGER), ("force", "true"), ("dryRun", "All"))
        content_type = "application/apply-patch+yaml"
        try:
            answer = await self._connection.write(
                "try", "Deployment", "PATCH", path, query=query, body=deployment, content_type=content_type
            )
        except Refused as error:
            if _UNKNOWN_FIELD in str(error):
                return False
            raise
        volumes = answer["spec"]["template"]["spec"].get("volumes") or ()
        return any("image" in volume for volume in volumes)
