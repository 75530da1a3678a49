"""Whether the API server takes pods with image volumes, found out by a write that stores nothing.

For ``kube``. A server that has them may have them turned off, and then takes the pod and silently drops the volume:
only what comes back tells. Whether each node's container runtime mounts them it does not tell: a pod whose runtime
can't says so.
"""

from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.domain.resource import names
from quire_operator.ports import Refused

_NAME = "quire-image-volume-probe"
_LABELS = {names.LABEL_MANAGED_BY: "quire-operator"}
_POD = {
    "containers": [{"name": "probe", "image": "probe"}],
    "volumes": [{"name": "probe", "image": {"reference": "probe"}}],
}
_PROBE = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": _NAME},
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": _LABELS},
        "template": {"metadata": {"labels": _LABELS}, "spec": _POD},
    },
}


class ImageVolumes:
    """Asks once."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._supported: bool | None = None

    async def supported(self, namespace: str) -> bool:
        """Needs the right to make Deployments in this namespace. Raises ``ClusterError``."""
        if self._supported is None:
            self._supported = await self._try(namespace)
        return self._supported

    async def _try(self, namespace: str) -> bool:
        path = f"/apis/apps/v1/namespaces/{namespace}/deployments/{_NAME}"
        query = (("fieldManager", names.FIELD_MANAGER), ("dryRun", "All"))
        content_type = "application/apply-patch+yaml"
        try:
            answer = await self._connection.write(
                "try", "Deployment", "PATCH", path, query=query, body=_PROBE, content_type=content_type
            )
        except Refused:
            return False  # too old to know the field
        volumes = answer["spec"]["template"]["spec"].get("volumes") or ()
        return any("image" in volume for volume in volumes)
