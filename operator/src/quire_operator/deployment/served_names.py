"""The claim of an LLMDeployment or LLMAdapter to its served name, as its status records it and as it shall be: pure."""

from collections.abc import Iterable

from quire_common.served_names import Claim, NameScope, held_by, next_second, reported_claim
from quire_operator.api import Spec
from quire_operator.api.fields import JSON, section_of, text_of
from quire_operator.kube.objects import Key, Resource


def recorded_claim(resource: Resource) -> Claim | None:
    """Return the claim by which the gateway routes; None before the first report."""
    return reported_claim(
        namespace=resource.key.namespace,
        deployment=resource.key.name,
        created=resource.created,
        is_leaving=resource.deleting,
        recorded=_recorded(resource.status),
        is_reported="observedGeneration" in resource.status,
        spec_name=spec_name(resource),
    )


def wanted_claim(resource: Resource, *, known: Claim | None, now: float) -> Claim:
    """Return the claim that the next status records. ``known`` is what this process recorded last, if anything.

    A name that changes, or that was not recorded while the spec was edited, is claimed from now on: an old
    LLMDeployment cannot take a name by an edit. An invalid spec claims its name too; otherwise it would lose the name
    to another one.
    """
    name = spec_name(resource) or resource.key.name
    return Claim(
        namespace=resource.key.namespace,
        deployment=resource.key.name,
        name=name,
        since=_since(resource, name, known or recorded_claim(resource), now),
        is_leaving=resource.deleting,
    )


def _since(resource: Resource, name: str, before: Claim | None, now: float) -> str:
    if before is not None and before.name == name:
        return before.since
    return resource.created if before is None and resource.generation <= 1 else next_second(now)


def recorded_adapter_claim(resource: Resource) -> Claim | None:
    """Return the claim of an LLMAdapter by which the gateway routes; None before the first report."""
    return reported_claim(
        namespace=resource.key.namespace,
        deployment=deployment_of(resource),
        created=resource.created,
        is_leaving=resource.deleting,
        recorded=_recorded(resource.status),
        is_reported=False,
        spec_name=None,
        adapter=resource.key.name,
    )


def wanted_adapter_claim(resource: Resource, *, now: float) -> Claim:
    """Return the claim that the next status of an LLMAdapter records, by the rules of ``wanted_claim``."""
    name = text_of(section_of(resource.body, "spec"), "servedName") or resource.key.name
    return Claim(
        namespace=resource.key.namespace,
        deployment=deployment_of(resource),
        name=name,
        since=_since(resource, name, recorded_adapter_claim(resource), now),
        is_leaving=resource.deleting,
        adapter=resource.key.name,
    )


def served_names(spec: Spec, scope: NameScope | None) -> tuple[str, ...]:
    """Return the model names that replicas accept: their own, and the one that clients of the gateway use."""
    name = spec.model.served_name
    return (name, f"{spec.namespace}/{name}") if scope is NameScope.NAMESPACED else (name,)


def status_section(claim: Claim) -> dict[str, object]:
    return {"name": claim.name, "since": claim.since}


def conflict(mine: Claim, claims: Iterable[Claim], scope: NameScope) -> str | None:
    """Return why requests for my served name go to another object; None if I hold the name."""
    others = [claim for claim in claims if claim.claimant != mine.claimant]
    requested = mine.requested_as(scope)
    first = held_by([mine, *others], scope)[requested][0]
    if first is mine:
        return None
    field, service = ("spec.servedName", "its") if mine.adapter else ("spec.model.servedName", "this")
    return (
        f"{field}: requests for the model {requested} go to {first.claimant_text}, which has served this name "
        f"for longer; choose another name. The Service of {service} LLMDeployment still works"
    )


def key_of(claim: Claim) -> Key:
    """Return the LLMDeployment to whose replicas a claim leads."""
    return Key(claim.namespace, claim.deployment)


def spec_name(resource: Resource) -> str | None:
    """Return ``spec.model.servedName`` of any spec, valid or not."""
    return text_of(section_of(resource.body, "spec", "model"), "servedName") or None


def deployment_of(resource: Resource) -> str:
    """Return the name of the LLMDeployment that an LLMAdapter names, valid or not."""
    return text_of(section_of(resource.body, "spec", "deploymentRef"), "name")


def _recorded(status: JSON) -> tuple[str, str] | None:
    recorded = section_of(status, "servedName")
    name, since = recorded.get("name"), recorded.get("since")
    return (name, since) if isinstance(name, str) and isinstance(since, str) else None
