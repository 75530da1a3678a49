"""``ports.Cluster`` on a real API server, by the official client: every read and write of ours but the Lease's.

Built by ``app``. Knows API paths, patch types and field managers; decides nothing.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from kubernetes.aio.client import (
    ApiextensionsV1Api,
    AppsV1Api,
    CoreV1Api,
    CustomObjectsApi,
    PolicyV1Api,
)

from quire_operator.adapters.kube_connection import Connection, as_mapping
from quire_operator.domain import names
from quire_operator.domain.desired import Manifest
from quire_operator.domain.observed import (
    Child,
    Key,
    Pod,
    Ref,
    Resource,
    key_of_child,
    trim_child,
    trim_pod,
    trim_resource,
)
from quire_operator.domain.plan import RemoveFields
from quire_operator.domain.status import Event
from quire_operator.ports import Conflict, NotFound

_APPLY = "application/apply-patch+yaml"
_STRATEGIC = "application/strategic-merge-patch+json"
_MERGE = "application/merge-patch+json"
_PAGE = 500
_CRD = f"{names.PLURAL}.{names.GROUP}"

Method = Callable[..., Awaitable[Any]]


class KubeCluster:
    """All namespaces, or some."""

    def __init__(self, connection: Connection, *, namespaces: Sequence[str]) -> None:
        """No namespaces means all."""
        client = connection.client
        self._connection = connection
        self._namespaces = tuple(namespaces)
        self._custom = CustomObjectsApi(client)
        self._core = CoreV1Api(client)
        self._extensions = ApiextensionsV1Api(client)
        apps, policy = AppsV1Api(client), PolicyV1Api(client)
        self._apis: dict[str, tuple[object, str]] = {
            "Deployment": (apps, "deployment"),
            "Service": (self._core, "service"),
            "ServiceAccount": (self._core, "service_account"),
            "PersistentVolumeClaim": (self._core, "persistent_volume_claim"),
            "PodDisruptionBudget": (policy, "pod_disruption_budget"),
        }

    async def is_established(self) -> bool:
        """Whether the API server serves LLMDeployments."""
        method = self._extensions.read_custom_resource_definition_without_preload_content
        try:
            body = as_mapping(await self._connection.read(method, _CRD))
        except NotFound:
            return False
        conditions = body.get("status", {}).get("conditions") or []
        return any(c.get("type") == "Established" and c.get("status") == "True" for c in conditions)

    async def read_child(self, key: Key, ref: Ref) -> Child | None:
        try:
            body = await self._connection.read(self._method("read", ref.kind), ref.name, key.namespace)
        except NotFound:
            return None
        return trim_child(as_mapping(body), kind=ref.kind)

    async def create(self, key: Key, manifest: Manifest) -> Child:
        return await self._apply("create", key, manifest, force=False)

    async def update(self, key: Key, manifest: Manifest) -> Child:
        return await self._apply("update", key, manifest, force=True)

    async def _apply(self, what: str, key: Key, manifest: Manifest, *, force: bool) -> Child:
        kind = manifest.ref.kind
        body = await self._connection.write(
            f"{what} {manifest.ref}",
            self._method("patch", kind),
            manifest.ref.name,
            key.namespace,
            manifest.body,
            field_manager=names.FIELD_MANAGER,
            force=force,
            _content_type=_APPLY,
        )
        return trim_child(as_mapping(body), kind=kind)

    async def remove_fields(self, key: Key, action: RemoveFields) -> Child:
        body = await self._connection.write(
            f"remove fields of {action.ref}",
            self._method("patch", action.ref.kind),
            action.ref.name,
            key.namespace,
            {**action.patch, "metadata": {"resourceVersion": action.version}},
            field_manager=names.FIELD_MANAGER,
            _content_type=_STRATEGIC,
        )
        return trim_child(as_mapping(body), kind=action.ref.kind)

    async def delete(self, key: Key, ref: Ref, uid: str) -> None:
        try:
            await self._connection.write(
                f"delete {ref}",
                self._method("delete", ref.kind),
                ref.name,
                key.namespace,
                body={"preconditions": {"uid": uid}, "propagationPolicy": "Background"},
            )
        except (NotFound, Conflict):
            return  # gone, or another one of that name by now

    async def set_deletion_costs(self, key: Key, costs: Mapping[str, str | None]) -> None:
        for pod, cost in costs.items():
            patch = {"metadata": {"annotations": {names.ANNOTATION_DELETION_COST: cost}}}
            try:
                await self._connection.write(
                    f"set the deletion cost of Pod {pod}",
                    self._core.patch_namespaced_pod_without_preload_content,
                    pod,
                    key.namespace,
                    patch,
                    field_manager=names.FIELD_MANAGER,
                    _content_type=_MERGE,
                )
            except NotFound:
                continue  # it went by itself

    async def write_status(self, resource: Resource, status: Mapping[str, object]) -> Resource:
        key = resource.key
        metadata = {
            "name": key.name,
            "namespace": key.namespace,
            "uid": resource.uid,
            "resourceVersion": resource.version,
        }
        body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata, "status": status}
        written = await self._connection.write(
            "write status",
            self._custom.patch_namespaced_custom_object_status_without_preload_content,
            *(names.GROUP, names.VERSION, key.namespace, names.PLURAL, key.name),
            body,
            field_manager=names.FIELD_MANAGER,
            force=True,
            _content_type=_APPLY,
        )
        return trim_resource(as_mapping(written))

    async def tell(self, resource: Resource, event: Event) -> None:
        key = resource.key
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        about = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": key.namespace,
            "name": key.name,
            "uid": resource.uid,
            "resourceVersion": resource.version,
        }
        body = {
            "metadata": {"name": f"{key.name}.{uuid4().hex[:16]}", "namespace": key.namespace},
            "involvedObject": about,
            "type": "Warning" if event.warning else "Normal",
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": "quire-operator"},
            "reportingComponent": "quire-operator",
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        create = self._core.create_namespaced_event_without_preload_content
        await self._connection.write(f"tell {event.reason}", create, key.namespace, body)

    async def list_resources(self) -> AsyncIterator[Resource]:
        """All LLMDeployments of our namespaces."""
        kind = (names.GROUP, names.VERSION)
        everywhere = self._custom.list_custom_object_for_all_namespaces_without_preload_content
        within = self._custom.list_namespaced_custom_object_without_preload_content
        for namespace in self._namespaces or (None,):
            where = (*kind, names.PLURAL) if namespace is None else (*kind, namespace, names.PLURAL)
            async for item in self._pages(everywhere if namespace is None else within, *where):
                yield trim_resource(item)

    async def list_children(self, kind: str) -> AsyncIterator[tuple[Key, Child]]:
        """All objects of a kind that carry our label."""
        api, name = self._apis[kind]
        async for item in self._list(api, name):
            if (key := key_of_child(item)) is not None:
                yield key, trim_child(item, kind=kind)

    async def list_pods(self) -> AsyncIterator[tuple[Key, Pod]]:
        """All pods that carry our label."""
        async for item in self._list(self._core, "pod"):
            if (key := key_of_child(item)) is not None:
                yield key, trim_pod(item)

    async def _list(self, api: object, name: str) -> AsyncIterator[Mapping[str, Any]]:
        for namespace in self._namespaces or (None,):
            method = f"list_{name}_for_all_namespaces" if namespace is None else f"list_namespaced_{name}"
            call: Method = getattr(api, f"{method}_without_preload_content")
            where = () if namespace is None else (namespace,)
            async for item in self._pages(call, *where, label_selector=names.LABEL_DEPLOYMENT):
                yield item

    async def _pages(self, method: Method, *where: object, **options: object) -> AsyncIterator[Mapping[str, Any]]:
        token: str | None = None
        while True:
            page = as_mapping(await self._connection.read(method, *where, limit=_PAGE, _continue=token, **options))
            for item in page.get("items") or []:
                yield as_mapping(item)
            token = page.get("metadata", {}).get("continue")
            if not token:
                return

    def _method(self, verb: str, kind: str) -> Method:
        api, name = self._apis[kind]
        method: Method = getattr(api, f"{verb}_namespaced_{name}_without_preload_content")
        return method
