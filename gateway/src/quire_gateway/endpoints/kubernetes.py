"""Discovery in a cluster: the Services and EndpointSlices of LLMDeployments, listed once and then watched.

A Service that carries ``quire.dev/served-name`` is a model, even while it has no endpoints; the slices that name it by
``kubernetes.io/service-name`` are its replicas. (The EndpointSlice controller copies a Service's labels to its slices
but not its annotations, and a model's name may be no valid label, so both kinds are watched.) While the API server is
away the last known set stands.
"""

import asyncio
import logging
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic

import aiohttp
import msgspec

from quire_gateway.endpoints import Endpoint, Publish, Snapshot
from quire_gateway.endpoints.kubernetes_access import Access

LABEL = "quire.dev/llmdeployment"
SERVED_NAME = "quire.dev/served-name"
SENIORITY = "quire.dev/seniority"
"""When the LLMDeployment of a Service was made, and its uid: outlives a Service that is made anew."""
OWNER = ("quire.dev/v1alpha1", "LLMDeployment")
PORT_NAME = "http"
_SERVICE_NAME = "kubernetes.io/service-name"

_WATCH_SECONDS = 15
_SILENCE_SECONDS = 20.0
"""A watch that says nothing for longer, not even its end, is cut off somewhere on the way."""
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=15.0)
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=_SILENCE_SECONDS)
_MAX_LINE_BYTES = 4 * 2**20
_PAGE = 500
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 10.0
_LASTED_SECONDS = 1.0
_NOT_ALLOWED_SECONDS = 5.0
"""An API server that has just begun refuses everybody for a moment; after longer it means it."""
_SETTLE_SECONDS = 0.02

_log = logging.getLogger(__name__)


# --- objects, as far as they matter ---


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
class Key:
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def snapshot_of(services: Mapping[Key, KubeObject], slices: Iterable[KubeObject]) -> Snapshot:
    """Models and their replicas. Of two Services with one served name that of the older LLMDeployment has it."""
    models = {keys[0]: model for model, keys in claims_of(services).items()}
    found: dict[str, dict[str, Endpoint]] = {model: {} for model in models.values()}
    for part in slices:
        service_name = (part.metadata.labels or {}).get(_SERVICE_NAME, "")
        model = models.get(Key(part.metadata.namespace, service_name))
        port = next((p.port for p in part.ports or () if p.name == PORT_NAME), None)
        if model is None or port is None:
            continue
        for address in part.endpoints or ():
            endpoint = _endpoint(address, part, port)
            known = found[model].get(endpoint.id)
            # For a moment a pod can be in two slices: the one that says less wins nothing.
            if known is None or endpoint.ready:
                found[model][endpoint.id] = endpoint
    return {model: tuple(endpoints[id_] for id_ in sorted(endpoints)) for model, endpoints in found.items()}


def claims_of(services: Mapping[Key, KubeObject]) -> dict[str, list[Key]]:
    """By served name those that say they serve it, the one that does first."""
    claims: dict[str, list[Key]] = {}
    for key, service in sorted(services.items(), key=lambda item: _age(*item)):
        model = (service.metadata.annotations or {}).get(SERVED_NAME)
        if model:
            claims.setdefault(model, []).append(key)
    return claims


def _age(key: Key, service: KubeObject) -> tuple[str, str]:
    """Lesser is older. The operator judges by the same.

    Anybody who may write Services could say any age. So only what an LLMDeployment controls, with its uid, is believed:
    if that is not of the operator's making, the operator sets it right or deletes it, and if there is no such
    LLMDeployment, Kubernetes does.
    """
    said = (service.metadata.annotations or {}).get(SENIORITY, "")
    owners = (owner for owner in service.metadata.owner_references or () if owner.controller)
    uid = next((owner.uid for owner in owners if (owner.api_version, owner.kind) == OWNER), "")
    believed = bool(uid) and said.endswith(f"/{uid}")
    return said if believed else service.metadata.creation_timestamp, str(key)


def _endpoint(address: _Address, part: KubeObject, port: int) -> Endpoint:
    host = address.addresses[0]
    pod = address.target_ref.name if address.target_ref is not None else None
    conditions = address.conditions
    # Unknown is to be read as true, says the API, but for terminating.
    return Endpoint(
        id=f"{part.metadata.namespace}/{pod or host}",
        url=f"http://[{host}]:{port}" if part.address_type == "IPv6" else f"http://{host}:{port}",
        ready=conditions.ready is not False,
        serving=conditions.serving is not False,
        terminating=conditions.terminating is True,
    )


# --- watching ---


class _Expired(Exception):
    """The watch's resource version is gone from the API server's memory: list again."""


class _Refused(Exception):
    """The API server answered, but not with what was asked for."""


class _NotAllowed(_Refused):
    """We may not look there: the namespace is gone, and our rights in it with it, or they were never given."""


@dataclass(slots=True)
class _Store:
    """What one watch knows."""

    path: str
    objects: dict[Key, KubeObject] = field(default_factory=dict)
    version: str | None = None
    """Where the watch goes on; None: list first."""
    is_synced: bool = False
    not_allowed_since: float | None = None
    is_given_up: bool = False
    """It was not allowed for so long that others need not wait for it."""

    def note_not_allowed(self, now: float) -> bool:
        """Whether that gives it up."""
        since = self.not_allowed_since = now if self.not_allowed_since is None else self.not_allowed_since
        before, self.is_given_up = self.is_given_up, now - since >= _NOT_ALLOWED_SECONDS
        return self.is_given_up and not before


class KubernetesDiscovery:
    """Two watches per namespace, or two in all."""

    def __init__(self, access: Access, session: aiohttp.ClientSession, *, namespaces: tuple[str, ...] = ()) -> None:
        self._access, self._session = access, session
        places = [f"namespaces/{namespace}/" for namespace in namespaces] or [""]
        self._services = [_Store(f"/api/v1/{place}services") for place in places]
        self._slices = [_Store(f"/apis/discovery.k8s.io/v1/{place}endpointslices") for place in places]
        self._changed = asyncio.Event()
        self._told: set[tuple[Key, str, Key]] = set()

    async def run(self, publish: Publish) -> None:
        """See ``Discovery``."""
        async with asyncio.TaskGroup() as group:
            for store in (*self._services, *self._slices):
                group.create_task(self._keep(store))
            while True:
                await self._changed.wait()
                # A rollout's events come in bursts.
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                if _is_known(self._services) and _is_known(self._slices):
                    publish(self._snapshot())

    def _snapshot(self) -> Snapshot:
        services = {key: item for store in self._services for key, item in store.objects.items()}
        self._tell_rivals(services)
        return snapshot_of(services, [item for store in self._slices for item in store.objects.values()])

    def _tell_rivals(self, services: Mapping[Key, KubeObject]) -> None:
        """Once, not at every change of anything."""
        claims = claims_of(services).items()
        rivals = {(key, model, keys[0]) for model, keys in claims for key in keys[1:]}
        for key, model, owner in sorted(rivals - self._told, key=str):
            _log.warning("%s serves %r, as %s does already; it gets no requests", key, model, owner)
        self._told = rivals

    async def _keep(self, store: _Store) -> None:
        """List and watch without end; every error is outlived."""
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
                _log.warning("%s: %s; what is known stays", store.path, error or type(error).__name__)
            except Exception:
                # Requests are served by what is known, whatever befalls the looking.
                _log.exception("%s: looking failed in a way nobody thought of; what is known stays", store.path)
            if monotonic() - started >= _LASTED_SECONDS:
                # It worked for a while: go on at once, for events may wait.
                pause = _FIRST_PAUSE_SECONDS
                continue
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(_LONGEST_PAUSE_SECONDS, pause * 2)

    async def _list(self, store: _Store) -> None:
        objects: dict[Key, KubeObject] = {}
        params = {"labelSelector": LABEL, "limit": str(_PAGE)}
        while True:
            async with self._get(store.path, params, _LIST_TIMEOUT) as response:
                await _check(response)
                page = msgspec.json.decode(await response.read(), type=_List)
            objects |= {Key(item.metadata.namespace, item.metadata.name): item for item in page.items}
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        store.objects, store.version, store.is_synced = objects, page.metadata.resource_version, True
        store.not_allowed_since, store.is_given_up = None, False
        self._changed.set()

    async def _watch(self, store: _Store) -> None:
        """Until the server ends it, which it is asked to do soon: a short watch hides no dead connection."""
        params = {
            "labelSelector": LABEL,
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
                    raise _Refused(f"an event of over {_MAX_LINE_BYTES} bytes")
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
        key = Key(item.metadata.namespace, item.metadata.name)
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


def _is_known(stores: Iterable[_Store]) -> bool:
    """Each that may be looked at was: of several namespaces one that is gone must not hide the models of all others."""
    looked_at = list(stores)
    return any(store.is_synced for store in looked_at) and all(s.is_synced or s.is_given_up for s in looked_at)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 410:
        raise _Expired
    if response.status != 200:
        kind = _NotAllowed if response.status == 403 else _Refused
        raise kind(f"the API server answered {response.status}: {(await response.text())[:200]}")
