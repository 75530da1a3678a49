"""``ports.Leases`` on a real API server: one Lease of coordination.k8s.io/v1, with times in UTC.

Its connection passes no fence, because a renewal is what opens the fence.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from quire_operator.adapters.kubernetes.connection import Connection
from quire_operator.ports import Lease, NotFound


class KubeLeases:
    """The Lease with this name."""

    def __init__(self, connection: Connection, *, namespace: str, name: str) -> None:
        self._connection, self._namespace, self._name = connection, namespace, name
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"

    async def read(self) -> Lease:
        """See ``ports.Leases``."""
        try:
            return _lease(await self._connection.read(f"{self._path}/{self._name}"))
        except NotFound:
            return Lease(version=None)

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        """See ``ports.Leases``."""
        metadata = {"name": self._name, "namespace": self._namespace}
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": metadata,
            "spec": {
                "holderIdentity": lease.holder,
                "leaseDurationSeconds": int(duration_seconds),
                "acquireTime": _text(lease.acquired),
                "renewTime": _text(lease.renewed),
                "leaseTransitions": lease.transitions,
            },
        }
        if lease.version is None:
            return _lease(await self._connection.write("create", "Lease", "POST", self._path, body=body))
        metadata["resourceVersion"] = lease.version
        path = f"{self._path}/{self._name}"
        return _lease(await self._connection.write("replace", "Lease", "PUT", path, body=body))


def _lease(body: Mapping[str, Any]) -> Lease:
    spec = body.get("spec") or {}
    return Lease(
        version=body["metadata"]["resourceVersion"],
        holder=spec.get("holderIdentity") or "",
        acquired=_time(spec.get("acquireTime")),
        renewed=_time(spec.get("renewTime")),
        transitions=spec.get("leaseTransitions") or 0,
    )


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat(timespec="microseconds").replace("+00:00", "Z")
