"""The client of the API server: all reads and writes of the operator except those of its Lease.

It decides nothing. Every write is a server-side apply where the API has one.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from quire_operator.api import names
from quire_operator.canary.manifests import KINDS
from quire_operator.capacity.judge import AMD_MEMORY_LABEL, GPU_MEMORY_LABEL, Labels
from quire_operator.deployment.desired import OPTIONAL_KINDS
from quire_operator.deployment.manifests import Manifest
from quire_operator.deployment.plan import RemoveFields
from quire_operator.deployment.status import Event
from quire_operator.kube.connection import JSON, Connection, listed
from quire_operator.kube.errors import Conflict, Forbidden, NotFound, PartlyForbidden, Refused
from quire_operator.kube.objects import Child, Key, Pod, Ref, Resource
from quire_operator.kube.ownership import without
from quire_operator.kube.trimming import key_of_child, trim_adapter, trim_child, trim_pod, trim_resource

_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"
_NO_VERSION = "1"
"""A version that no object has: it is that of an empty store."""
_MANAGER = ("fieldManager", names.FIELD_MANAGER)
_CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.PLURAL}.{names.GROUP}"
_RESOURCES = (f"/apis/{names.API_VERSION}", names.PLURAL)
_ADAPTERS = (f"/apis/{names.API_VERSION}", names.ADAPTER_PLURAL)
_SLICES = ("/apis/discovery.k8s.io/v1", "endpointslices")
WAKE_SLICES = "endpointslice.kubernetes.io/managed-by=quire-operator"
"""The EndpointSlices of earlier versions, which lead requests to a port that gateways no longer have."""
_PODS, _EVENTS, _SECRETS = ("/api/v1", "pods"), ("/api/v1", "events"), ("/api/v1", "secrets")
_NODES, _NODES_PAGE = "/api/v1/nodes", 500
_NO_IMAGE_VOLUMES = "image: field not declared in schema"
"""The answer of an API server that is too old to know the field of image volumes."""
_OPTIONAL_APIS = sorted({child.api_version for child in KINDS if child.is_optional})
_CHILDREN = {
    child.kind: (f"/{'apis' if '/' in child.api_version else 'api'}/{child.api_version}", child.plural)
    for child in KINDS
}


def _path(api: tuple[str, str], namespace: str | None, name: str | None = None) -> str:
    prefix, plural = api
    within = prefix if namespace is None else f"{prefix}/namespaces/{namespace}"
    return f"{within}/{plural}" if name is None else f"{within}/{plural}/{name}"


class KubeClient:
    """The API server, for all namespaces or some of them.

    Every method raises ``ClusterError`` and waits for a few seconds at most. Writes return the object as it is stored.
    """

    def __init__(self, connection: Connection, *, namespaces: Sequence[str] = ()) -> None:
        """Use these namespaces; an empty sequence means all."""
        self._connection = connection
        self._has_image_volumes = False
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)

    async def is_established(self) -> bool:
        """Return True if the API server serves LLMDeployments."""
        try:
            body = await self._connection.read(_CRD)
        except NotFound:
            return False
        conditions = body.get("status", {}).get("conditions") or []
        return any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions)

    # --- the cluster ---

    async def served_kinds(self) -> frozenset[str]:
        found: set[str] = set()
        for api in _OPTIONAL_APIS:
            try:
                body = await self._connection.read(f"/apis/{api}")
            except NotFound:
                continue
            found |= {resource.get("kind") for resource in body.get("resources") or []}
        return OPTIONAL_KINDS & found

    async def node_labels(self) -> tuple[Labels, ...]:
        """Return the labels of each node that reports its GPU memory; nothing else of nodes is read."""
        found: list[Labels] = []
        # A selector cannot ask for one label or another.
        for label in (GPU_MEMORY_LABEL, AMD_MEMORY_LABEL):
            query = (("labelSelector", label),)
            nodes = listed(self._connection.read_metadata, _NODES, query=query, page=_NODES_PAGE)
            found += [node["metadata"].get("labels") or {} async for node in nodes]
        return tuple(found)

    async def takes_image_volumes(self, key: Key, deployment: Manifest) -> bool:
        """Return whether the API server keeps the image volume of this Deployment: the same for all keys.

        It is asked until it says yes: an upgrade may turn image volumes on. A server without them accepts the pod and
        drops the volume, so only the answer to a dry run shows it. The trial is the Deployment itself, so that policies
        check the same object as later. Their rejection raises ``ClusterError``.
        """
        if not self._has_image_volumes:
            try:
                answer = await self._apply_raw("try", key, deployment, force="true", dry_run=True)
            except Refused as error:
                if _NO_IMAGE_VOLUMES not in str(error):
                    raise
                return False
            volumes = answer["spec"]["template"]["spec"].get("volumes") or ()
            self._has_image_volumes = any("image" in volume for volume in volumes)
        return self._has_image_volumes

    # --- children ---

    async def check_template(self, key: Key, deployment: Manifest) -> None:
        """Have the API server check a Deployment without storing it. Raises ``Refused`` if it rejects its pods."""
        await self._apply_raw("try", key, deployment, force="true", dry_run=True)

    async def create_secret(self, key: Key, manifest: Manifest) -> None:
        """Create a Secret; it is no error if it exists, and neither is its content read."""
        path = _path(_SECRETS, key.namespace)
        try:
            await self._connection.write("create", "Secret", "POST", path, query=(_MANAGER,), body=manifest.body)
        except Conflict:
            return  # it exists

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        """Return the object with this name and any owner, or None if it does not exist."""
        try:
            body = await self._connection.read(_path(_CHILDREN[ref.kind], key.namespace, ref.name))
        except NotFound:
            return None
        return trim_child(body, kind=ref.kind)

    async def read_resource(self, key: Key) -> Resource | None:
        """Return the current LLMDeployment, or None if it does not exist.

        This lists one item, because the operator may list LLMDeployments but not get them.
        """
        query = (("fieldSelector", f"metadata.name={key.name}"), ("limit", "1"))
        body = await self._connection.read(_path(_RESOURCES, key.namespace), query=query)
        return next((trim_resource(item) for item in body.get("items") or []), None)

    async def create(self, key: Key, manifest: Manifest, *, must_be_new: bool) -> Child:
        """Apply the manifest without force. Raises ``Conflict`` if another client set one of its fields differently.

        If it ``must_be_new``, an object that has its name is not changed: raises ``Conflict`` whatever it contains.
        """
        if must_be_new:
            # The server compares the version with that of an existing object, and ignores it for a new one.
            metadata: Any = manifest.body["metadata"]
            body = {**manifest.body, "metadata": {**metadata, "resourceVersion": _NO_VERSION}}
            manifest = replace(manifest, body=body)
        return await self._apply("create", key, manifest, force="false")

    async def update(self, key: Key, manifest: Manifest) -> Child:
        """Apply the manifest with force, so that our fields get our values back."""
        return await self._apply("update", key, manifest, force="true")

    async def _apply(self, verb: str, key: Key, manifest: Manifest, *, force: str) -> Child:
        return trim_child(await self._apply_raw(verb, key, manifest, force=force), kind=manifest.ref.kind)

    async def _apply_raw(self, verb: str, key: Key, manifest: Manifest, *, force: str, dry_run: bool = False) -> JSON:
        kind = manifest.ref.kind
        path = _path(_CHILDREN[kind], key.namespace, manifest.ref.name)
        query = (_MANAGER, ("force", force), *((("dryRun", "All"),) if dry_run else ()))
        return await self._connection.write(
            verb, kind, "PATCH", path, query=query, body=manifest.body, content_type=_APPLY
        )

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        """Remove fields that others added. Raises ``Conflict`` if the object has changed since it was observed.

        No apply removes a field of others, so this is a merge patch that repeats the rest of lists.
        """
        kind = action.ref.kind
        path = _path(_CHILDREN[kind], key.namespace, action.ref.name)
        live = await self._connection.read(path)
        fields = without(live, [field.path for field in action.fields])
        patch = {**fields, "metadata": {"resourceVersion": action.version}}
        body = await self._connection.write(
            "remove-fields", kind, "PATCH", path, query=(_MANAGER,), body=patch, content_type=_MERGE
        )
        return trim_child(body, kind=kind)

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        """Delete the object with this uid; it is no error if it no longer exists."""
        await self._delete(ref.kind, _path(_CHILDREN[ref.kind], key.namespace, ref.name), uid)

    async def delete_wake_slices(self) -> None:
        async for item in self._list_objects(_SLICES, ("labelSelector", WAKE_SLICES)):
            metadata = item["metadata"]
            path = _path(_SLICES, metadata["namespace"], metadata["name"])
            await self._delete("EndpointSlice", path, metadata["uid"])

    async def _delete(self, kind: str, path: str, uid: str) -> None:
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._connection.write("delete", kind, "DELETE", path, body=options)
        except (NotFound, Conflict):
            return  # it is gone, or another object has its name by now

    # --- pods ---

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        """Set the deletion cost of each pod; None removes it. A shrinking Deployment removes the lowest cost first."""
        for pod, cost in costs.items():
            try:
                await self._annotate("set-deletion-cost", key.namespace, pod, {names.ANNOTATION_DELETION_COST: cost})
            except NotFound:
                continue  # it is already gone

    async def annotate_pod(self, namespace: str, pod: str, digest: str) -> None:
        """Note on a pod which list of adapters it is to read, so that its kubelet renews the file at once."""
        await self._annotate("annotate", namespace, pod, {names.ANNOTATION_ADAPTERS: digest})

    async def _annotate(self, verb: str, namespace: str, pod: str, annotations: Mapping[str, str | None]) -> None:
        path, patch = _path(_PODS, namespace, pod), {"metadata": {"annotations": annotations}}
        await self._connection.write(verb, "Pod", "PATCH", path, query=(_MANAGER,), body=patch, content_type=_MERGE)

    # --- LLMDeployments and LLMAdapters ---

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """Write the whole status of an LLMDeployment. Raises ``Conflict`` if it has changed since it was observed."""
        return trim_resource(await self._write_object_status(_RESOURCES, names.KIND, resource, status))

    async def write_adapter_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        """Write the whole status of an LLMAdapter. Raises ``Conflict`` if it has changed since it was observed."""
        return trim_adapter(await self._write_object_status(_ADAPTERS, names.ADAPTER_KIND, resource, status))

    async def _write_object_status(
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
        """Create an Event about an LLMDeployment or LLMAdapter."""
        path = _path(_EVENTS, resource.key.namespace)
        await self._connection.write("create", "Event", "POST", path, body=_event_body(resource, event))

    # --- lists ---

    async def list_resources(self) -> AsyncIterator[Resource]:
        async for item in self._list_objects(_RESOURCES):
            yield trim_resource(item)

    async def list_adapters(self) -> AsyncIterator[Resource]:
        """Yield all LLMAdapters in the watched namespaces. Raises ``NotFound`` if the cluster lacks the kind."""
        async for item in self._list_objects(_ADAPTERS):
            yield trim_adapter(item)

    async def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        """Yield all objects of one child kind that have our label."""
        async for item in self._list_objects(_CHILDREN[kind], ("labelSelector", names.LABEL_DEPLOYMENT)):
            if (key := key_of_child(item)) is not None:
                yield key, trim_child(item, kind=kind)

    async def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        """Yield all pods that have our label."""
        async for item in self._list_objects(_PODS, ("labelSelector", names.LABEL_DEPLOYMENT)):
            if (key := key_of_child(item)) is not None:
                yield key, trim_pod(item)

    async def _list_objects(self, api: tuple[str, str], *query: tuple[str, str]) -> AsyncIterator[JSON]:
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
