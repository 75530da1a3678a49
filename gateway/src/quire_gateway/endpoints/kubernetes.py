"""Discovery in a cluster: LLMDeployments and their EndpointSlices, listed once and then watched.

An LLMDeployment is a model, even while it has no endpoints. Its name comes from ``status.servedName``, which only the
operator writes. Its replicas are in the slices of the Service that is named after it, in its own namespace. No
annotation, label or age of a Service counts, because tenants may edit Services. While the API server is unreachable,
the last known endpoints stay valid.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, TypeVar

import aiohttp
import msgspec

from quire_common.contract.engine import HTTP_PORT_NAME
from quire_common.contract.gateway import Endpoint, HoldPolicy, ModelEndpoints
from quire_common.contract.kubernetes import API_VERSION, LABEL_DEPLOYMENT, PLURAL
from quire_common.quantities import parse_duration_seconds
from quire_common.served_names import Claim, NameScope, held_by, reported_claim
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

_Kept = TypeVar("_Kept")

_log = logging.getLogger(__name__)


# --- the fields of objects that are needed ---


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
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


class KubeSlice(msgspec.Struct, frozen=True, rename="camel"):
    """An EndpointSlice."""

    metadata: _Meta
    address_type: str | None = None
    endpoints: list[_Address] | None = None
    ports: list[_Port] | None = None


class _Model(msgspec.Struct, frozen=True, rename="camel"):
    served_name: str | None = None


class _ScaleToZero(msgspec.Struct, frozen=True, rename="camel"):
    hold_timeout: str | None = None
    max_held: int | None = None


class _Autoscaling(msgspec.Struct, frozen=True, rename="camel"):
    scale_to_zero: _ScaleToZero | None = None


class _Spec(msgspec.Struct, frozen=True):
    model: _Model = _Model()
    autoscaling: _Autoscaling | None = None


class _Capacity(msgspec.Struct, frozen=True, rename="camel"):
    start_up_seconds: float | None = None


class _ServedName(msgspec.Struct, frozen=True):
    name: str
    since: str


class _DeploymentStatus(msgspec.Struct, frozen=True, rename="camel"):
    served_name: _ServedName | None = None
    capacity: _Capacity | None = None
    observed_generation: int | None = None


class KubeDeployment(msgspec.Struct, frozen=True):
    """An LLMDeployment."""

    metadata: _Meta
    spec: _Spec = _Spec()
    status: _DeploymentStatus = _DeploymentStatus()

    @property
    def claim(self) -> Claim | None:
        """The claim to its served name; None before the operator has reported it."""
        recorded = self.status.served_name
        return reported_claim(
            namespace=self.metadata.namespace,
            deployment=self.metadata.name,
            created=self.metadata.creation_timestamp,
            is_leaving=self.metadata.deletion_timestamp is not None,
            recorded=None if recorded is None else (recorded.name, recorded.since),
            is_reported=self.status.observed_generation is not None,
            spec_name=self.spec.model.served_name,
        )

    @property
    def hold(self) -> HoldPolicy:
        """The policy for requests that wait for a replica. An unusable value is left to the gateway."""
        autoscaling, capacity = self.spec.autoscaling, self.status.capacity
        rules = (autoscaling and autoscaling.scale_to_zero) or _ScaleToZero()
        timeout = None if rules.hold_timeout is None else parse_duration_seconds(rules.hold_timeout)
        max_held = _within(rules.max_held, _MOST_HELD)
        return HoldPolicy(
            timeout_seconds=_within(timeout, _LONGEST_HOLD_SECONDS),
            max_held=None if max_held is None else int(max_held),
            start_up_seconds=_within(None if capacity is None else capacity.start_up_seconds, _LONGEST_HOLD_SECONDS),
        )


def _within(value: float | None, most: float) -> float | None:
    return value if value is not None and 0.0 <= value <= most else None


class _Object(msgspec.Struct, frozen=True):
    metadata: _Meta


class _List(msgspec.Struct, frozen=True):
    metadata: _Meta
    items: list[msgspec.Raw]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The part of an LLMDeployment that is kept, so that few changes count as news."""

    claim: Claim
    hold: HoldPolicy


def snapshot_of(known: Iterable[KnownModel], slices: Iterable[KubeSlice], scope: NameScope) -> Snapshot:
    """Return the models and their replicas. Of several claims to a name, only the first one counts."""
    holds = {each.claim: each.hold for each in known}
    first = {model: claims[0] for model, claims in held_by(holds, scope).items()}
    models = {_key_of(claim): model for model, claim in first.items()}
    found: dict[str, dict[str, Endpoint]] = {model: {} for model in models.values()}
    for part in slices:
        service_name = (part.metadata.labels or {}).get(_SERVICE_NAME, "")
        # The Service is named after its LLMDeployment.
        model = models.get(ObjectKey(part.metadata.namespace, service_name))
        port = next((p.port for p in part.ports or () if p.name == HTTP_PORT_NAME), None)
        if model is None or port is None:
            continue
        for address in part.endpoints or ():
            endpoint = _endpoint(address, part, port)
            other = found[model].get(endpoint.id)
            # A pod can be in two slices for a moment: the one that lists it as ready counts.
            if other is None or endpoint.ready:
                found[model][endpoint.id] = endpoint
    return {
        model: ModelEndpoints(
            name=model, endpoints=tuple(endpoints[id_] for id_ in sorted(endpoints)), hold=holds[first[model]]
        )
        for model, endpoints in found.items()
    }


def count_gateways(slices: Iterable[KubeSlice]) -> int:
    """Return the number of pods in a gateway Service's slices that are ready; a pod with two addresses is one."""
    return len(
        {
            address.target_ref.name if address.target_ref is not None else address.addresses[0]
            for part in slices
            for address in part.endpoints or ()
            if address.conditions.ready is not False and address.conditions.terminating is not True
        }
    )


def _key_of(claim: Claim) -> ObjectKey:
    return ObjectKey(claim.namespace, claim.deployment)


def _endpoint(address: _Address, part: KubeSlice, port: int) -> Endpoint:
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


class _NoSuchKind(_NotAllowed):
    """A kind that the API server does not have: no CRD is installed, so there are no objects."""


@dataclass(slots=True)
class _Store(Generic[_Kept]):
    """The objects and the state of one watch."""

    path: str
    read: Callable[[msgspec.Raw], _Kept | None]
    """Returns what is kept of an object; None if nothing is."""
    selector: str = ""
    objects: dict[ObjectKey, _Kept] = field(default_factory=dict)
    version: str | None = None
    """The version at which the watch continues; None: list first."""
    is_synced: bool = False
    not_allowed_since: float | None = None
    is_given_up: bool = False
    """True if it was forbidden for so long that the other watches no longer wait for it."""

    def keep(self, item: msgspec.Raw) -> bool:
        """Keep what is needed of an object, and return whether that changed."""
        key, kept = _key_in(item), self.read(item)
        before = self.objects.pop(key, None)
        if kept is not None:
            self.objects[key] = kept
        return kept != before

    def note_not_allowed(self, now: float) -> bool:
        """Record that the watch is forbidden; return whether it is given up now."""
        since = self.not_allowed_since = now if self.not_allowed_since is None else self.not_allowed_since
        before, self.is_given_up = self.is_given_up, now - since >= _NOT_ALLOWED_SECONDS
        return self.is_given_up and not before


def _key_in(item: msgspec.Raw) -> ObjectKey:
    metadata = msgspec.json.decode(item, type=_Object).metadata
    return ObjectKey(metadata.namespace, metadata.name)


def _read_slice(item: msgspec.Raw) -> KubeSlice:
    return msgspec.json.decode(item, type=KubeSlice)


def read_model(item: msgspec.Raw | bytes) -> KnownModel | None:
    """Return what is kept of an LLMDeployment.

    An object that no operator can have reported, whatever the installed schema lets through, claims nothing.
    """
    try:
        deployment = msgspec.json.decode(item, type=KubeDeployment)
    except msgspec.ValidationError:
        return None
    claim = deployment.claim
    return None if claim is None else KnownModel(claim=claim, hold=deployment.hold)


class KubernetesDiscovery:
    """Discovery by two watches per namespace, or two for all namespaces."""

    def __init__(
        self,
        access: Access,
        session: aiohttp.ClientSession,
        *,
        namespaces: tuple[str, ...] = (),
        scope: NameScope = NameScope.CLUSTER,
        gateway_service: tuple[str, str] | None = None,
    ) -> None:
        self._access, self._session, self._scope = access, session, scope
        places = [f"namespaces/{namespace}/" for namespace in namespaces] or [""]
        self._models = [_Store(f"/apis/{API_VERSION}/{place}{PLURAL}", read_model) for place in places]
        self._slices = [
            _Store(f"/apis/discovery.k8s.io/v1/{place}endpointslices", _read_slice, LABEL_DEPLOYMENT)
            for place in places
        ]
        self._gateways = _gateway_stores(gateway_service)
        self._changed = asyncio.Event()
        self._logged: set[tuple[ObjectKey, str, ObjectKey]] = set()

    async def run(self, publish: Publish) -> None:
        """See ``Discovery``."""
        async with asyncio.TaskGroup() as group:
            for models in self._models:
                group.create_task(self._follow(models))
            for slices in (*self._slices, *self._gateways):
                group.create_task(self._follow(slices))
            while True:
                await self._changed.wait()
                # A rollout's events come in bursts.
                await asyncio.sleep(_SETTLE_SECONDS)
                self._changed.clear()
                # A gateway that does not know how many there are would allow each tenant too much.
                gateways_known = not self._gateways or _is_known(self._gateways)
                if _is_known(self._models) and _is_known(self._slices) and gateways_known:
                    publish(self._snapshot())

    @property
    def num_gateways(self) -> int:
        """See ``Discovery``."""
        return max(1, count_gateways(item for store in self._gateways for item in store.objects.values()))

    def _snapshot(self) -> Snapshot:
        known = [model for store in self._models for model in store.objects.values()]
        self._log_conflicts([model.claim for model in known])
        return snapshot_of(known, [item for store in self._slices for item in store.objects.values()], self._scope)

    def _log_conflicts(self, claims: Iterable[Claim]) -> None:
        """Log each conflict once, not at every change."""
        held = held_by(claims, self._scope).items()
        conflicts = {(_key_of(claim), model, _key_of(first)) for model, (first, *rest) in held for claim in rest}
        for key, model, owner in sorted(conflicts - self._logged, key=str):
            _log.warning("served name conflict: %s claims %r, which %s serves; it gets no requests", key, model, owner)
        self._logged = conflicts

    async def _follow(self, store: _Store[_Kept]) -> None:
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
                    if isinstance(error, _NoSuchKind):
                        store.objects, store.is_synced = {}, True
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

    async def _list(self, store: _Store[_Kept]) -> None:
        objects: dict[ObjectKey, _Kept] = {}
        params = {"labelSelector": store.selector, "limit": str(_PAGE)}
        while True:
            async with self._get(store.path, params, _LIST_TIMEOUT) as response:
                await _check(response)
                page = msgspec.json.decode(await response.read(), type=_List)
            objects |= {_key_in(item): kept for item in page.items if (kept := store.read(item)) is not None}
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        store.objects, store.version, store.is_synced = objects, page.metadata.resource_version, True
        store.not_allowed_since, store.is_given_up = None, False
        self._changed.set()

    async def _watch(self, store: _Store[_Kept]) -> None:
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

    def _apply(self, store: _Store[_Kept], event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            if status.code == 410:
                raise _Expired
            raise _Refused(f"{status.code} {status.message}")
        store.version = msgspec.json.decode(event.object, type=_Object).metadata.resource_version
        if event.type == "BOOKMARK":
            return
        if event.type == "DELETED":
            changed = store.objects.pop(_key_in(event.object), None) is not None
        else:
            changed = store.keep(event.object)
        if changed:
            self._changed.set()

    def _get(
        self, path: str, params: Mapping[str, str], timeout: aiohttp.ClientTimeout
    ) -> "aiohttp.client._RequestContextManager":
        return self._session.get(
            f"{self._access.url}{path}", params=params, headers=self._access.headers(), timeout=timeout
        )


def _gateway_stores(service: tuple[str, str] | None) -> list[_Store[KubeSlice]]:
    if service is None:
        return []
    namespace, name = service
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
    return [_Store(path, _read_slice, f"{_SERVICE_NAME}={name}")]


def _is_known(stores: Iterable[_Store[_Kept]]) -> bool:
    """Return whether every permitted watch is synced: one missing namespace must not hide the models of the others."""
    watched = list(stores)
    return any(store.is_synced for store in watched) and all(store.is_synced or store.is_given_up for store in watched)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 410:
        raise _Expired
    if response.status != 200:
        kind = {403: _NotAllowed, 404: _NoSuchKind}.get(response.status, _Refused)
        raise kind(f"the API server answered {response.status}: {(await response.text())[:200]}")
