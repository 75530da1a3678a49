"""The adapters of an LLMDeployment: which of its LLMAdapters replicas are to serve, and why not the others. Pure.

The listed ones are in a ConfigMap, whose file the engines read again when it changes (``adapters_file``). An adapter
that gateways do not route to, because another object has its name, is still listed: the Service of its LLMDeployment
serves it. Only a name that the same engine already uses is left out.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b

from quire_common.contract.adapters_file import ADAPTERS_KEY, AdapterEntry, render_adapters
from quire_common.model_source import FileSource, Source
from quire_common.served_names import Claim, NameScope
from quire_operator.api import AdapterSpec, Invalid, Spec
from quire_operator.deployment.served_names import conflict, deployment_of, served_names, wanted_adapter_claim
from quire_operator.deployment.volumes import MODELS_PATH, adapter_credentials, file_problem
from quire_operator.kube.objects import Key, Resource

JSON = dict[str, object]

VOLUME = "adapters"
_PATH = "/etc/quire/adapters"
ADAPTERS_FILE = f"{_PATH}/{ADAPTERS_KEY}"
_GENERATION_BYTES = 6
"""A JSON number of this size is exact in every reader."""


class Refusal(StrEnum):
    """Reasons why an LLMAdapter is not served that the operator finds; ``AdapterFailure`` has those of engines."""

    INVALID_SPEC = "InvalidSpec"
    DEPLOYMENT_NOT_FOUND = "DeploymentNotFound"
    DEPLOYMENT_INVALID = "DeploymentInvalid"
    ADAPTERS_DISABLED = "AdaptersDisabled"
    NAME_TAKEN = "NameTaken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One LLMAdapter, and what was decided about it."""

    resource: Resource
    claim: Claim
    """The claim to its served name that its status is to record."""
    entry: AdapterEntry | None = None
    """The line of the list that engines read; None if the list leaves it out."""
    refusal: Refusal | None = None
    message: str = ""


def deployment_key(resource: Resource) -> Key:
    """Return the LLMDeployment that an LLMAdapter names, valid or not."""
    return Key(resource.key.namespace, deployment_of(resource))


def listings(
    adapters: Iterable[Resource],
    deployment: Resource | None,
    claims: Callable[[str], Sequence[Claim]],
    *,
    scope: NameScope | None,
    now: float,
) -> tuple[Listing, ...]:
    """Return the decisions about all adapters of one LLMDeployment, by age of their claims.

    ``claims`` returns the recorded claims of all objects to a served name; without a ``scope`` there is no gateway.
    """
    parsed = None if deployment is None or deployment.deleting else Spec.parse(deployment.body)
    present = [resource for resource in adapters if not resource.deleting]
    claimed = sorted(((wanted_adapter_claim(each, now=now), each) for each in present), key=lambda pair: pair[0].order)
    taken: dict[str, str] = {}
    found: list[Listing] = []
    for claim, resource in claimed:
        listing = _listing(resource, claim, parsed, taken, claims, scope)
        if listing.entry is not None:
            taken[listing.entry.name] = claim.claimant_text
        found.append(listing)
    return tuple(found)


def _listing(
    resource: Resource,
    claim: Claim,
    deployment: Spec | Invalid | None,
    taken: Mapping[str, str],
    claims: Callable[[str], Sequence[Claim]],
    scope: NameScope | None,
) -> Listing:
    def refused(refusal: Refusal, message: str, entry: AdapterEntry | None = None) -> Listing:
        return Listing(resource=resource, claim=claim, entry=entry, refusal=refusal, message=message)

    spec = AdapterSpec.parse(resource.body)
    if isinstance(spec, Invalid):
        return refused(Refusal.INVALID_SPEC, str(spec))
    if (problem := file_problem(spec.source)) is not None:
        return refused(Refusal.INVALID_SPEC, f"spec.source: {problem}")
    named = f"LLMDeployment {spec.deployment}"
    if deployment is None:
        message = f"spec.deploymentRef.name: there is no {named} in namespace {spec.namespace}; create it"
        return refused(Refusal.DEPLOYMENT_NOT_FOUND, message)
    if isinstance(deployment, Invalid):
        return refused(Refusal.DEPLOYMENT_INVALID, f"the spec of {named} is invalid; see its condition Ready")
    if deployment.engine.adapters is None:
        message = f"{named} has no room for adapters: set its spec.engine.adapters, for example to {{maxRank: 16}}"
        return refused(Refusal.ADAPTERS_DISABLED, message)
    name = requested_name(claim, scope)
    if name in served_names(deployment, scope):
        return refused(Refusal.NAME_TAKEN, _taken(name, f"the model of {named}"))
    if (holder := taken.get(name)) is not None:
        return refused(Refusal.NAME_TAKEN, _taken(name, holder))
    entry = AdapterEntry(
        name=name, source=engine_source(spec.source), generation=_generation(resource, spec), placement=spec.placement
    )
    rival = None if scope is None else conflict(claim, claims(claim.name), scope)
    if rival is not None:
        return refused(Refusal.NAME_TAKEN, rival, entry)
    return Listing(resource=resource, claim=claim, entry=entry)


def requested_name(claim: Claim, scope: NameScope | None) -> str:
    """Return the model name of an adapter in requests, at the gateway and at replicas."""
    return claim.requested_as(scope or NameScope.CLUSTER)


def _taken(name: str, holder: str) -> str:
    return f"spec.servedName: the replicas already serve {holder} as {name}; choose another name"


def engine_source(source: Source) -> str:
    """Return the source as the engine of a pod understands it: a relative folder is below that of the models."""
    if isinstance(source, FileSource) and source.relative:
        return f"{MODELS_PATH}/{source.path}"
    return str(source)


def _generation(resource: Resource, spec: AdapterSpec) -> int:
    """Return a number that changes whenever replicas must load the adapter again.

    An object that was deleted and created again counts as new, a changed placement or name does not.
    """
    text = "\n".join((resource.uid, str(spec.source), resource.refresh_model))
    return int.from_bytes(blake2b(text.encode(), digest_size=_GENERATION_BYTES).digest())


# --- in pods ---


def config_map(entries: Iterable[AdapterEntry]) -> JSON:
    return {"data": {ADAPTERS_KEY: render_adapters(entries)}}


def entries_digest(entries: Iterable[AdapterEntry]) -> str:
    """Return a hash that is equal for equal lists of adapters."""
    return blake2b(render_adapters(entries).encode(), digest_size=8).hexdigest()


def adapters_volume(config_map_name: str) -> JSON:
    """Return the volume. It is optional, so that a pod does not wait for a list that a person deleted."""
    return {"name": VOLUME, "configMap": {"name": config_map_name, "optional": True}}


def adapters_mount() -> JSON:
    return {"name": VOLUME, "mountPath": _PATH, "readOnly": True}


def adapters_environment(spec: Spec) -> list[JSON]:
    """Return the credentials with which the engine downloads adapters."""
    slots = spec.engine.adapters
    secret = None if slots is None else slots.credentials_secret
    return [] if secret is None else adapter_credentials(secret)
