"""Whether the API server takes pods with image volumes, found out by a write that stores nothing.

For ``kube``. The server of a version that has them may have them turned off, and then drops the field before it judges
the pod: only trying tells. Whether each node's container runtime mounts them it does not tell: a pod whose runtime
can't says so.
"""

from quire_operator.adapters.kube_connection import Connection
from quire_operator.domain import names
from quire_operator.ports import QuotaExceeded, Refused

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
            await self._connection.write(
                "try", "Deployment", "PATCH", path, query=query, body=_PROBE, content_type=content_type
            )
        except Refused:
            return False  # a volume of which nothing was left
        except QuotaExceeded:
            return True  # what is counted has been judged before
        return True
