"""``leader.Leases`` on a real API server: one Lease of coordination.k8s.io/v1, in UTC.

Its connection passes no gate: renewing is what opens the gate.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from kubernetes.aio.client import CoordinationV1Api

from quire_operator.adapters.kube_connection import Connection, as_mapping
from quire_operator.leader import Lease
from quire_operator.ports import NotFound


class KubeLeases:
    """The Lease of this name."""

    def __init__(self, connection: Connection, *, namespace: str, name: str) -> None:
        self._connection, self._namespace, self._name = connection, namespace, name
        self._api = CoordinationV1Api(connection.client)

    async def read(self) -> Lease:
        method = self._api.read_namespaced_lease_without_preload_content
        try:
            return _lease(as_mapping(await self._connection.read(method, self._name, self._namespace)))
        except NotFound:
            return Lease(version=None)

    async def write(self, lease: Lease, *, duration_seconds: float) -> Lease:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {
                "holderIdentity": lease.holder,
                "leaseDurationSeconds": int(duration_seconds),
                "acquireTime": _text(lease.acquired),
                "renewTime": _text(lease.renewed),
                "leaseTransitions": lease.transitions,
            },
        }
        if lease.version is None:
            create = self._api.create_namespaced_lease_without_preload_content
            written = await self._connection.write("create the Lease", create, self._namespace, body)
        else:
            body["metadata"] = {**as_mapping(body["metadata"]), "resourceVersion": lease.version}
            replace = self._api.replace_namespaced_lease_without_preload_content
            written = await self._connection.write("renew the Lease", replace, self._name, self._namespace, body)
        return _lease(as_mapping(written))


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
