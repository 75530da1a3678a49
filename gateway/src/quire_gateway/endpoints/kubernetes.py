"""Discovery in a cluster: the Services and EndpointSlices of LLMDeployments, listed once and then watched.

A Service with the annotation ``quire.dev/served-name`` is a model, even while it has no endpoints; the slices that name
it by ``kubernetes.io/service-name`` are its replicas. Both kinds are watched: the EndpointSlice controller copies a
Service's labels to its slices but not its annotations, and a model's name may not be a valid label. While the API
server is unreachable, the last known endpoints stay valid.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
import msgspec

from quire_common.contract.engine import HTTP_PORT_NAME
from quire_common.contract.gateway import Endpoint, HoldPolicy, ModelEndpoints
from quire_common.contract.kubernetes import (
    ANNOTATION_HOLD_TIMEOUT,
    ANNOTATION_MAX_HELD,
    ANNOTATION_SENIORITY,
    ANNOTATION_SERVED_NAME,
    ANNOTATION_START_UP,
    API_VERSION,
    KIND,
    LABEL_DEPLOYMENT,
)
from quire_gateway.endpoints import Publish, Snapshot
from quire_gateway.endpoints.kubernetes_access import Access

_SERVICE_NAME = "kubernetes.io/service-name"

_WATCH_SECONDS = 15
_SILENCE_SECONDS = 20.0
"""A watch that is silent for longer, without even ending, has lost its connection."""
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE_SECONDS)
_MAX_LINE_BYTES = 4 * 2**20
_PAGE = 500
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_STABLE_SECONDS = 1.0
_NOT_ALLOWED_SECONDS = 5.0
"""An API server that has just started answers every client with 403 for a moment; after this time it is real."""
_SETTLE_SECONDS = 0.02
_LONGEST_HOLD_SECONDS = 86_400.0
_MOST_HELD = 1_000_000

_log = logging.getLogger(__name__)


# --- the fields of objects that are needed ---


class _Owner(msgspec.Struct, frozen=True, rename="camel"):
    api_version: str = ""
    kind: str = ""
    uid: str = ""
    controller: bool | None = None


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: list[_Owner] | None = None
    continue_: str | None = msgspec.field(name="continue", default=None)


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str | None = None


class _Address(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class KubeObject(msgspec.Struct, frozen=True, rename="camel"):
    """A Service or an EndpointSlice."""

    metadata: _Meta
    address_type: str | None = None
    endpoints: list[_Address] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct, frozen=True):
    metadata: _Meta
    items: list[KubeObject]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """The namespace and name of an object."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def snapshot_of(services: Mapping[ObjectKey, KubeObject], slices: Iterable[KubeObject]) -> Snapshot:
    """Return the models and their replicas. If two Services claim one served name, the older LLMDeployment gets it."""
    models = {keys[0]: model for model, keys in claims_of(services).items()}
    policies = {model: _hold_policy(services[key].metadata.annotations or {}) for key, model in models.items()}
    found: dict[str, dict[str, Endpoint]] = {model: {} for model in models.values()}
    for part in slices:
        service_name = (part.metadata.labels or {}).get(_SERVICE_NAME, "")
        model = models.get(ObjectKey(part.metadata.namespace, service_name))
        port = next((p.port for p in part.ports or () if p.name == HTTP_PORT_NAME), None)
        if model is None or port is None:
            continue
        for address in part.endpoints or ():
            endpoint = _endpoint(address, part, port)
            known = found[model].get(endpoint.id)
            # A pod can be in two slices for a moment: the one that lists it as ready counts.
            if known is None or endpoint.ready:
                found[model][endpoint.id] = endpoint
    return {
        model: ModelEndpoints(
            name=model, endpoints=tuple(endpoints[id_] for id_ in sorted(endpoints)), hold=policies[model]
        )
        for model, endpoints in found.items()
    }


def _hold_policy(annotations: Mapping[str, str]) -> HoldPolicy:
    """Return the policy that the operator wrote. A value that is no such number leaves the setting to the gateway."""
    max_held = _number(annotations.get(ANNOTATION_MAX_HELD), _MOST_HELD)
    return HoldPolicy(
        timeout_seconds=_number(annotations.get(ANNOTATION_HOLD_TIMEOUT), _LONGEST_HOLD_SECONDS),
        max_held=None if max_held is None else int(max_held),
        start_up_seconds=_number(annotations.get(ANNOTATION_START_UP), _LONGEST_HOLD_SECONDS),
    )


def _number(text: str | None, most: float) -> float | None:
    """Return a number from 0 to ``most``, or None."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0.0 <= value <= most else None


def count_gateways(slices: Iterable[KubeObject]) -> int:
    """Return the number of pods in a gateway Service's slices that are ready; a pod with two addresses is one."""
    return len(
        {
            address.target_ref.name if address.target_ref is not None else address.addresses[0]
            for part in slices
            for address in part.endpoints or ()
            if address.conditions.ready is not False and address.conditions.terminating is not True
        }
    )


def claims_of(services: Mapping[ObjectKey, KubeObject]) -> dict[str, list[ObjectKey]]:
    """Return the Services that claim each served name, the rightful one first."""
    claims: dict[str, list[ObjectKey]] = {}
    for key, service in sorted(services.items(), key=lambda item: _age(*item)):
        model = (service.metadata.annotations or {}).get(ANNOTATION_SERVED_NAME)
        if model:
            claims.setdefault(model, []).append(key)
    return claims


def _age(key: ObjectKey, service: KubeObject) -> tuple[str, str]:
    """Return a sort key: the lesser one is older. The operator compares by the same key.

    Every client with write access to Services could claim any age. So the annotation counts only on a Service that an
    LLMDeployment controls, and with its uid. If the operator did not create such a Service, it corrects or deletes it;
    if there is no such LLMDeployment, Kubernetes deletes it.
    """
    claimed = (service.metadata.annotations or {}).get(ANNOTATION_SENIORITY, "")
    owners = (owner for owner in service.metadata.owner_references or () if owner.controller)
    uid = next((owner.uid for owner in owners if (owner.api_version, owner.kind) == (API_VERSION, KIND)), "")
    is_valid = bool(uid) and claimed.endswith(f"/{uid}")
    return claimed if is_valid else service.metadata.creation_timestamp, str(key)


def _endpoint(address: _Address, part: KubeObject, port: int) -> Endpoint:
    host = address.addresses[0]
    pod = address.target_ref.name if address.target_ref is not None else None
    conditions = address.conditions
    # The API defines unknown as true, except for terminating.
    return Endpoint(
        id=f"{part.metadata.namespace}/{pod or host}",
        url=f"http://[{host}]:{port}" if part.address_type == "IPv6" else f"http://{host}:{port}",
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
    )


# --- watching ---


class _Expired(Exception):
    """A watch whose resource version the API server no longer has: the objects must be listed again."""


class _Refused(Exception):
    """An answer of the API server other than the requested one."""


class _NotAllowed(_Refused):
    """A missing permission: it was never granted, or it vanished with its namespace."""


@dataclass(slots=True)
class _Store:
    """The objects and the state of one watch."""

    path: str
    selector: str = LABEL_DEPLOYMENT
    objects: dict[ObjectKey, KubeObject] = field(default_factory=dict)
    version: str | None = None
    """The version at which the watch continues; None: list first."""
    is_synced: bool = False
    not_allowed_since: float | None = None
    is_given_up: bool = False
    """True if it was forbidden for so long that the other watches no longer wait for it."""

    def note_not_allowed(self, now: float) -> bool:
        """Record that the watch is forbidden; return whether it is given up now."""
        since = self.not_allowed_since = now if self.not_allowed_since is None else self.not_allowed_since
        before, self.is_given_up = self.is_given_up, now - since >= _NOT_ALLOWED_SECONDS
        return self.is_given_up and not before


class KubernetesDiscovery:
    """Discovery by two watches per namespace, or two for all namespaces."""

    def __init__(
        self,
        access: Access,
        session: aiohttp.ClientSession,
        *,
        namespaces: tuple[str, ...] = (),
        gateway_service: tuple[str, str] | None = None,
    ) -> None:
        self._access, self._session = access, session
        places = [f"namespaces/{namespace}/" for namespace in namespaces] or [""]
        self._services = [_Store(f"/api/v1/{place}services") for place in places]
        self._slices = [_Store(f"/apis/discovery.k8s.io/v1/{place}endpointslices") for place in places]
        self._gateways = _gateway_stores(gateway_service)
        self._changed = asyncio.Event()
        self._logged: set[tuple[ObjectKey, str, ObjectKey]] = set()

    async def run(self, publish: Publish) -> None:
        """See ``Discovery``."""
        async with asyncio.TaskGroup() as group:
            for store in (*self._services, *self._slices, *self._gateways):
                group.create_task(self._follow(store))
            while True:
                await self._changed.wait()
                # A rollout's events come in bursts.
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                # A gateway that does not know how many there are would allow each tenant too much.
                gateways_known = not self._gateways or _is_known(self._gateways)
                if _is_known(self._services) and _is_known(self._slices) and gateways_known:
                    publish(self._snapshot())

    @property
    def num_gateways(self) -> int:
        """See ``Discovery``."""
        slices = [item for store in self._gateways for item in store.objects.values()]
        return max(1, count_gateways(slices))

    def _snapshot(self) -> Snapshot:
        services = {key: item for store in self._services for key, item in store.objects.items()}
        self._log_conflicts(services)
        return snapshot_of(services, [item for store in self._slices for item in store.objects.values()])

    def _log_conflicts(self, services: Mapping[ObjectKey, KubeObject]) -> None:
        """Log each conflict once, not at every change."""
        claims = claims_of(services).items()
        conflicts = {(key, model, keys[0]) for model, keys in claims for key in keys[1:]}
        for key, model, owner in sorted(conflicts - self._logged, key=str):
            _log.warning("served name conflict: %s claims %r, which %s serves; it gets no requests", key, model, owner)
        self._logged = conflicts

    async def _follow(self, store: _Store) -> None:
        """List and watch until cancelled; errors are logged and retried."""
        pause = _FIRST_PAUSE_SECONDS
        while True:
            started = monotonic()
            try:
                if store.version is None:
                    await self._list(store)
                await self._watch(store)
            except _Expired:
                store.version = None
            except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError, _Refused) as error:
                if isinstance(error, _NotAllowed) and store.note_not_allowed(monotonic()):
                    self._changed.set()
                reason = error or type(error).__name__
                _log.warning("watch failed, keeping the last known endpoints: %s: %s", store.path, reason)
            except Exception:
                # A bug here must not stop requests, which need only the endpoints that are known.
                _log.exception("unexpected watch error, keeping the last known endpoints: %s", store.path)
            if monotonic() - started >= _STABLE_SECONDS:
                # The watch worked for a while: continue at once, because events may be waiting.
                pause = _FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)

    async def _list(self, store: _Store) -> None:
        objects: dict[ObjectKey, KubeObject] = {}
        params = {"labelSelector": store.selector, "limit": str(_PAGE)}
        while True:
            async with self._get(store.path, params, _LIST_TIMEOUT) as response:
                await _check(response)
                page = msgspec.json.decode(await response.read(), type=_List)
            objects |= {ObjectKey(item.metadata.namespace, item.metadata.name): item for item in page.items}
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        store.objects, store.version, store.is_synced = objects, page.metadata.resource_version, True
        store.not_allowed_since, store.is_given_up = None, False
        self._changed.set()

    async def _watch(self, store: _Store) -> None:
        """Watch until the server ends it, soon and on request, because a short watch cannot hide a dead connection."""
        params = {
            "labelSelector": store.selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": store.version or "",
            "timeoutSeconds": str(_WATCH_SECONDS),
        }
        async with self._get(store.path, params, _WATCH_TIMEOUT) as response:
            await _check(response)
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _MAX_LINE_BYTES:
                    raise _Refused(f"an event has more than {_MAX_LINE_BYTES} bytes")
                for line in lines:
                    self._apply(store, msgspec.json.decode(line, type=_Event))

    def _apply(self, store: _Store, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == 410:
                raise _Expired
            raise _Refused(f"{status.code} {status.message}")
        item = msgspec.json.decode(event.object, type=KubeObject)
        store.version = item.metadata.resource_version
        if event.type == "BOOKMARK":
            return
        key = ObjectKey(item.metadata.namespace, item.metadata.name)
        if event.type == "DELETED":
            store.objects.pop(key, None)
        else:
            store.objects[key] = item
        self._changed.set()

    def _get(
        self, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.client._RequestContextManager":
        return self._session.get(
            f"{self._access.url}{path}", params=params, headers=self._access.headers(), timeout=timeout
        )


def _gateway_stores(service: tuple[str, str] | None) -> list[_Store]:
    if service is None:
        return []
    namespace, name = service
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    return [_Store(path, selector=f"{_SERVICE_NAME}={name}")]


def _is_known(stores: Iterable[_Store]) -> bool:
    """Return whether every permitted watch is synced: one missing namespace must not hide the models of the others."""
    watched = list(stores)
    return any(store.is_synced for store in watched) and all(store.is_synced or store.is_given_up for store in watched)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 410:
        raise _Expired
    if response.status != 200:
        kind = _NotAllowed if response.status == 403 else _Refused
        raise kind(f"the API server answered {response.status}: {(await response.text())[:200]}")
