"""The claim of an LLMDeployment to its served name, as its status records it and as it shall be: pure.

``quire_common.served_names`` decides which of several claims counts, for the operator and the gateway alike. This
module reads and writes ``status.servedName``, the only record of a claim.
"""

from collections.abc import Iterable, Mapping

from quire_common.served_names import Claim, NameScope, held_by, next_second, reported_claim
from quire_operator.domain.cluster_state.observed import Key, Resource

JSON = Mapping[str, object]


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
    before = known or recorded_claim(resource)
    if before is not None and before.name == name:
        since = before.since
    elif before is None and resource.generation <= 1:
        since = resource.created
    else:
        since = next_second(now)
    return Claim(
        namespace=resource.key.namespace,
        deployment=resource.key.name,
        name=name,
        since=since,
        is_leaving=resource.deleting,
    )


def status_section(claim: Claim) -> dict[str, object]:
    """Return ``status.servedName``."""
    return {"name": claim.name, "since": claim.since}


def conflict(mine: Claim, claims: Iterable[Claim], scope: NameScope) -> str | None:
    """Return why requests for my served name go to another LLMDeployment; None if I hold the name."""
    others = [claim for claim in claims if key_of(claim) != key_of(mine)]
    requested = mine.requested_as(scope)
    first = held_by([mine, *others], scope)[requested][0]
    if first is mine:
        return None
    return (
        f"spec.model.servedName: requests for the model {requested} go to {key_of(first)}, which has served this name "
        "for longer; choose another name. The Service of this LLMDeployment still works"
    )


def key_of(claim: Claim) -> Key:
    """Return the LLMDeployment that made a claim."""
    return Key(claim.namespace, claim.deployment)


def spec_name(resource: Resource) -> str | None:
    """Return ``spec.model.servedName`` of any spec, valid or not."""
    model = _map(_map(resource.body, "spec"), "model")
    name = model.get("servedName")
    return name if isinstance(name, str) and name else None


def _recorded(status: JSON) -> tuple[str, str] | None:
    section = _map(status, "servedName")
    name, since = section.get("name"), section.get("since")
    return (name, since) if isinstance(name, str) and isinstance(since, str) else None


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}
