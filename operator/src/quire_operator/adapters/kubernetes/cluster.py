"""``ports.Cluster`` on a real API server, with the official client: all reads and writes except those of the Lease.

``app`` builds it. It knows API paths, patch types and field managers, and decides nothing.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from quire_operator.adapters.kubernetes.connection import JSON, Connection, listed
from quire_operator.adapters.kubernetes.image_volumes import ImageVolumes
from quire_operator.domain.cluster_state.observed import LEADER_WORKER_SET, Child, Key, Pod, Ref, Resource
from quire_operator.domain.cluster_state.ownership import merge_removal
from quire_operator.domain.cluster_state.trimming import key_of_child, trim_child, trim_pod, trim_resource
from quire_operator.domain.convergence.plan import RemoveFields
from quire_operator.domain.manifests.canary import KINDS
from quire_operator.domain.manifests.child_kinds import OPTIONAL_KINDS
from quire_operator.domain.manifests.objects import Manifest
from quire_operator.domain.resource import names
from quire_operator.domain.status.status import Event
from quire_operator.ports import Conflict, Forbidden, NotFound, PartlyForbidden

_APPLY = "application/apply-patch+yaml"
_STRATEGIC = "application/strategic-merge-patch+json"
_MERGE = "application/merge-patch+json"
_NO_VERSION = "1"
"""A version that no object has: it is that of an empty store."""
_MANAGER = ("fieldManager", names.FIELD_MANAGER)
_CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
_RESOURCES = (f"/apis/{names.API_VERSION}", names.PLURAL)
_SLICES = ("/apis/discovery.k8s.io/v1", "endpointslices")
WAKE_SLICES = "endpointslice.kubernetes.io/managed-by=quire-operator"
"""The EndpointSlices of earlier versions, which lead requests to a port that gateways no longer have."""
_PODS, _EVENTS, _SECRETS = ("/api/v1", "pods"), ("/api/v1", "events"), ("/api/v1", "secrets")
_OPTIONAL_APIS = sorted({child.api_version for child in KINDS if child.is_optional})
_CHILDREN = {
    child.kind: (f"/{'apis' if '/' in child.api_version else 'api'}/{child.api_version}", child.plural)
    for child in KINDS
}


def _path(api: tuple[str, str], namespace: str | None, name: str | None = None) -> str:
    prefix, plural = api
    within = prefix if namespace is None else f"{prefix}/namespaces/{namespace}"
    return f"{within}/{plural}" if name is None else f"{within}/{plural}/{name}"


class KubeCluster:
    """The API server, for all namespaces or some of them."""

    def __init__(self, connection: Connection, *, namespaces: Sequence[str]) -> None:
        """Use these namespaces; an empty sequence means all."""
        self._connection = connection
        self._image_volumes = ImageVolumes(connection)
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)

    async def is_established(self) -> bool:
        """Return True if the API server serves LLMDeployments."""
        try:
            body = await self._connection.read(_CRD)
        except NotFound:
            return False
        conditions = body.get("status", {}).get("conditions") or []
        return any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions)

    async def served_kinds(self) -> frozenset[str]:
        """See ``ports.Cluster``."""
        found: set[str] = set()
        for api in _OPTIONAL_APIS:
            try:
                body = await self._connection.read(f"/apis/{api}")
            except NotFound:
                continue
            found |= {resource.get("kind") for resource in body.get("resources") or []}
        return OPTIONAL_KINDS & found

    async def takes_image_volumes(self, key: Key, deployment: Manifest) -> bool:
        """See ``ports.Cluster``."""
        return await self._image_volumes.supported(key.namespace, deployment.body)

    async def check_template(self, key: Key, deployment: Manifest) -> None:
        """See ``ports.Cluster``. This applies as ``update`` does, but stores nothing."""
        await self._apply("try", key, deployment, force="true", dry_run=True)

    async def create_secret(self, key: Key, manifest: Manifest) -> None:
        """See ``ports.Cluster``."""
        path = _path(_SECRETS, key.namespace)
        try:
            await self._connection.write("create", "Secret", "POST", path, query=(_MANAGER,), body=manifest.body)
        except Conflict:
            return  # it exists

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        """See ``ports.Cluster``."""
        try:
            body = await self._connection.read(_path(_CHILDREN[ref.kind], key.namespace, ref.name))
        except NotFound:
            return None
        return trim_child(body, kind=ref.kind)

    async def read_resource(self, key: Key) -> Resource | None:
        """See ``ports.Cluster``. This lists one item, because the operator may list LLMDeployments but not get them."""
        query = (("fieldSelector", f"metadata.name={key.name}"), ("limit", "1"))
        body = await self._connection.read(_path(_RESOURCES, key.namespace), query=query)
        return next((trim_resource(item) for item in body.get("items") or []), None)

    async def create(self, key: Key, manifest: Manifest, *, must_be_new: bool) -> Child:
        """See ``ports.Cluster``."""
        if must_be_new:
            # The server compares the version with that of an existing object, and ignores it for a new one.
            metadata: Any = manifest.body["metadata"]
            body = {**manifest.body, "metadata": {**metadata, "resourceVersion": _NO_VERSION}}
            manifest = replace(manifest, body=body)
        return await self._apply("create", key, manifest, force="false")

    async def update(self, key: Key, manifest: Manifest) -> Child:
        """See ``ports.Cluster``."""
        return await self._apply("update", key, manifest, force="true")

    async def _apply(self, verb: str, key: Key, manifest: Manifest, *, force: str, dry_run: bool = False) -> Child:
        kind = manifest.ref.kind
        path = _path(_CHILDREN[kind], key.namespace, manifest.ref.name)
        query = (_MANAGER, ("force", force), *((("dryRun", "All"),) if dry_run else ()))
        body = await self._connection.write(
            verb, kind, "PATCH", path, query=query, body=manifest.body, content_type=_APPLY
        )
        return trim_child(body, kind=kind)

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        """See ``ports.Cluster``."""
        kind = action.ref.kind
        path = _path(_CHILDREN[kind], key.namespace, action.ref.name)
        fields, content_type = action.patch, _STRATEGIC
        if kind == LEADER_WORKER_SET:
            # A custom resource has no strategic merge patch, and a merge patch replaces whole lists.
            live = await self._connection.read(path)
            fields, content_type = merge_removal(live, [field.path for field in action.fields]), _MERGE
        patch = {**fields, "metadata": {"resourceVersion": action.version}}
        body = await self._connection.write(
            "remove-fields", kind, "PATCH", path, query=(_MANAGER,), body=patch, content_type=content_type
        )
        return trim_child(body, kind=kind)

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        """See ``ports.Cluster``."""
        await self._delete(ref.kind, _path(_CHILDREN[ref.kind], key.namespace, ref.name), uid)

    async def delete_wake_slices(self) -> None:
        """Delete ``WAKE_SLICES``."""
        async for item in self.list_objects(_SLICES, ("labelSelector", WAKE_SLICES)):
            metadata = item["metadata"]
            path = _path(_SLICES, metadata["namespace"], metadata["name"])
            await self._delete("EndpointSlice", path, metadata["uid"])

    async def _delete(self, kind: str, path: str, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._connection.write("delete", kind, "DELETE", path, body=options)
        except (NotFound, Conflict):
            return  # it is gone, or another object has its name by now

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        """See ``ports.Cluster``."""
        for pod, cost in costs.items():
            path = _path(_PODS, key.namespace, pod)
            patch = {"metadata": {"annotations": {names.ANNOTATION_DELETION_COST: cost}}}
            try:
                await self._connection.write(
                    "set-deletion-cost", "Pod", "PATCH", path, query=(_MANAGER,), body=patch, content_type=_MERGE
                )
            except NotFound:
                continue  # it is already gone

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """See ``ports.Cluster``."""
        return trim_resource(await self.write_object_status(_RESOURCES, names.KIND, resource, status))

    async def write_object_status(
        self, api: tuple[str, str], kind: str, resource: Resource, status: Mapping[str, object]
    ) -> JSON:
        """Replace the status of a custom resource unless it has changed; return the object."""
        key = resource.key
        body = {
            "apiVersion": names.API_VERSION,
            "kind": kind,
            "metadata": {
                "name": key.name,
                "namespace": key.namespace,
                "uid": resource.uid,
                "resourceVersion": resource.version,
            },
            "status": status,
        }
        path = f"{_path(api, key.namespace, key.name)}/status"
        query = (_MANAGER, ("force", "true"))
        return await self._connection.write(
            "write-status", kind, "PATCH", path, query=query, body=body, content_type=_APPLY
        )

    async def record_event(self, resource: Resource, event: Event) -> None:
        """See ``ports.Cluster``."""
        path = _path(_EVENTS, resource.key.namespace)
        await self._connection.write("create", "Event", "POST", path, body=_event_body(resource, event))

    async def list_resources(self) -> AsyncIterator[Resource]:
        """See ``ports.Cluster``."""
        async for item in self.list_objects(_RESOURCES):
            yield trim_resource(item)

    async def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        """See ``ports.Cluster``."""
        async for item in self.list_objects(_CHILDREN[kind], ("labelSelector", names.LABEL_DEPLOYMENT)):
            if (key := key_of_child(item)) is not None:
                yield key, trim_child(item, kind=kind)

    async def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        """See ``ports.Cluster``."""
        async for item in self.list_objects(_PODS, ("labelSelector", names.LABEL_DEPLOYMENT)):
            if (key := key_of_child(item)) is not None:
                yield key, trim_pod(item)

    async def list_objects(self, api: tuple[str, str], *query: tuple[str, str]) -> AsyncIterator[JSON]:
        """Yield the items of all namespaces. Without permission in some, list the others and raise at the end."""
        refused: dict[str, Forbidden] = {}
        for namespace in self._namespaces:
            try:
                async for item in listed(self._connection.read, _path(api, namespace), query=query):
                    yield item
            except Forbidden as error:
                if namespace is None:
                    raise
                refused[namespace] = error
        if refused:
            first = next(iter(refused.values()))
            if len(refused) == len(self._namespaces):
                raise first
            raise PartlyForbidden(str(first), namespaces=frozenset(refused))


def _event_body(resource: Resource, event: Event) -> dict[str, Any]:
    key = resource.key
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name}.{uuid4().hex[:16]}", "namespace": key.namespace},
        "involvedObject": {
            "apiVersion": names.API_VERSION,
            "kind": resource.body["kind"],
            "namespace": key.namespace,
            "name": key.name,
            "uid": resource.uid,
            "resourceVersion": resource.version,
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": "quire-operator"},
        "reportingComponent": "quire-operator",
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
