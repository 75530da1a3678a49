"""The objects of Kubernetes that discovery reads: the fields that are needed, and the snapshot that follows from them.

Pure; ``kubernetes`` lists and watches. Only ``status.servedName`` and the Service that is named after an LLMDeployment
count, because tenants may edit Services.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from quire_common.contract.engine import HTTP_PORT_NAME
from quire_common.contract.gateway import CANARY, STABLE, CanaryRoute, Endpoint, HoldPolicy, ModelEndpoints
from quire_common.contract.kubernetes import CANARY_SUFFIX
from quire_common.quantities import parse_duration_seconds
from quire_common.served_names import Claim, NameScope, held_by, reported_claim
from quire_gateway.endpoints import Snapshot

SERVICE_NAME = "kubernetes.io/service-name"
"""The label of an EndpointSlice that names its Service."""
_LONGEST_HOLD_SECONDS = 86_400.0
_MOST_HELD = 1_000_000


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


class _Rollout(msgspec.Struct, frozen=True, rename="camel"):
    canary_revision: str | None = None
    weight_percent: int | None = None
    compared_per_million: int | None = None


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    """The status of an LLMDeployment, or of an LLMAdapter, which has only the first field."""

    served_name: _ServedName | None = None
    capacity: _Capacity | None = None
    observed_generation: int | None = None
    rollout: _Rollout | None = None


class KubeDeployment(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def claim(self) -> Claim | None:
        """The claim to its served name; None before the operator has reported it."""
        is_reported = self.status.observed_generation is not None
        spec_name = self.spec.model.served_name
        return _claim(self.metadata, self.status, self.metadata.name, is_reported=is_reported, spec_name=spec_name)

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

    @property
    def canary(self) -> CanaryRoute | None:
        """The route of its canary, which only the operator can have written; None without one."""
        rollout = self.status.rollout
        if rollout is None or not rollout.canary_revision:
            return None
        weight = _within(rollout.weight_percent, 100.0)
        return CanaryRoute(
            revision=rollout.canary_revision,
            weight_percent=0 if weight is None else int(weight),
            compared_percent=(_within(rollout.compared_per_million, 1_000_000) or 0) / 10_000,
        )


def _within(value: float | None, most: float) -> float | None:
    return value if value is not None and 0.0 <= value <= most else None


class _AdapterSpec(msgspec.Struct, frozen=True, rename="camel"):
    deployment_ref: _Target


class KubeAdapter(msgspec.Struct, frozen=True):
    metadata: _Meta
    spec: _AdapterSpec
    status: _Status = _Status()


def _claim(
    metadata: _Meta,
    status: _Status,
    deployment: str,
    *,
    is_reported: bool = False,
    spec_name: str | None = None,
    adapter: str = "",
) -> Claim | None:
    recorded = status.served_name
    return reported_claim(
        namespace=metadata.namespace,
        deployment=deployment,
        created=metadata.creation_timestamp,
        is_leaving=metadata.deletion_timestamp is not None,
        recorded=None if recorded is None else (recorded.name, recorded.since),
        is_reported=is_reported,
        spec_name=spec_name,
        adapter=adapter,
    )


class KubeObject(msgspec.Struct, frozen=True):
    metadata: _Meta


class KubeList(msgspec.Struct, frozen=True):
    """A page of a list."""

    metadata: _Meta
    items: list[msgspec.Raw]


class WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class KubeStatus(msgspec.Struct, frozen=True):
    """An error of the API server."""

    code: int = 0
    message: str = ""


class ObjectKey(NamedTuple):
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """The part of an LLMDeployment that is kept, so that few changes count as news."""

    claim: Claim
    hold: HoldPolicy
    canary: CanaryRoute | None = None


def snapshot_of(
    known: Sequence[KnownModel], slices: Iterable[KubeSlice], scope: NameScope, adapters: Iterable[Claim] = ()
) -> Snapshot:
    """Return the models, their adapters, and the replicas of each. Of several claims to a name, the first one counts.

    An adapter of an LLMDeployment that does not exist is unknown.
    """
    kept = {key_of(each.claim): each for each in known}
    claims = [*(each.claim for each in known), *(claim for claim in adapters if key_of(claim) in kept)]
    first = {model: claims[0] for model, claims in held_by(claims, scope).items()}
    models = {key_of(claim): model for model, claim in first.items() if not claim.adapter}
    found: dict[ObjectKey, dict[str, Endpoint]] = {key_of(claim): {} for claim in first.values()}
    # The Services are named after their LLMDeployment. One that is named like the canary of another has its own.
    canaries = {
        ObjectKey(key.namespace, f"{key.name}{CANARY_SUFFIX}"): (key, CANARY)
        for key in found
        if kept[key].canary is not None
    }
    services = canaries | {key: (key, STABLE) for key in found}
    for part in slices:
        service_name = (part.metadata.labels or {}).get(SERVICE_NAME, "")
        key, track = services.get(ObjectKey(part.metadata.namespace, service_name), (None, STABLE))
        port = next((p.port for p in part.ports or () if p.name == HTTP_PORT_NAME), None)
        if key is None or port is None:
            continue
        for address in part.endpoints or ():
            endpoint = _endpoint(address, part, port, track)
            other = found[key].get(endpoint.id)
            # A pod can be in two slices for a moment: the one that lists it as ready counts.
            if other is None or endpoint.ready:
                found[key][endpoint.id] = endpoint
    sorted_endpoints = {key: tuple(each[id_] for id_ in sorted(each)) for key, each in found.items()}
    return {
        model: ModelEndpoints(
            name=model,
            endpoints=sorted_endpoints[key_of(claim)],
            hold=kept[key_of(claim)].hold,
            canary=None if claim.adapter else kept[key_of(claim)].canary,
            adapter_of=models.get(key_of(claim), "") if claim.adapter else None,
            service=str(key_of(claim)),
        )
        for model, claim in first.items()
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


def key_of(claim: Claim) -> ObjectKey:
    """Return the LLMDeployment to whose replicas a claim leads."""
    return ObjectKey(claim.namespace, claim.deployment)


def _endpoint(address: _Address, part: KubeSlice, port: int, track: str) -> Endpoint:
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
        track=track,
    )


def key_in(item: msgspec.Raw) -> ObjectKey:
    metadata = msgspec.json.decode(item, type=KubeObject).metadata
    return ObjectKey(metadata.namespace, metadata.name)


def read_slice(item: msgspec.Raw) -> KubeSlice:
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
    if claim is None:
        return None
    return KnownModel(claim=claim, hold=deployment.hold, canary=deployment.canary)


def read_adapter(item: msgspec.Raw | bytes) -> Claim | None:
    """Return the claim of an LLMAdapter, which is all that is kept of it."""
    try:
        adapter = msgspec.json.decode(item, type=KubeAdapter)
    except msgspec.ValidationError:
        return None
    deployment = adapter.spec.deployment_ref.name or ""
    return _claim(adapter.metadata, adapter.status, deployment, adapter=adapter.metadata.name)
