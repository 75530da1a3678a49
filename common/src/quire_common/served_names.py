"""Which LLMDeployment or LLMAdapter a model name belongs to: the operator reports it, the gateway routes by it. Pure.

A name belongs to the object that has claimed it for the longest time. Every claim comes from ``status``, which
only the operator may write, and from times that the API server sets. Nothing that a tenant may edit counts: neither
annotations nor other objects, and a changed ``spec.model.servedName`` starts a new claim.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum


class NameScope(Enum):
    """The scope in which a served name is unique."""

    CLUSTER = "cluster"
    """Clients ask for ``chat``."""
    NAMESPACED = "namespaced"
    """Clients ask for ``team-a/chat``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of one LLMDeployment, or of an LLMAdapter of it, to a served name."""

    namespace: str
    deployment: str
    name: str
    """The served name."""
    since: str
    """The time from which the object has claimed this name without a break, in RFC 3339 and whole seconds."""
    is_leaving: bool = False
    """True if the object is being deleted. It then comes after all others: a finalizer must not keep a name."""
    adapter: str = ""
    """The LLMAdapter that claims the name; empty if the LLMDeployment itself does."""

    def requested_as(self, scope: NameScope) -> str:
        """Return the model name that clients of the gateway use."""
        return f"{self.namespace}/{self.name}" if scope is NameScope.NAMESPACED else self.name

    @property
    def claimant(self) -> tuple[str, str, str]:
        """The identity of the object that makes the claim."""
        return self.namespace, "" if self.adapter else self.deployment, self.adapter

    @property
    def claimant_text(self) -> str:
        """The object that claims the name, as messages call it."""
        return f"LLMAdapter {self.namespace}/{self.adapter}" if self.adapter else f"{self.namespace}/{self.deployment}"

    @property
    def order(self) -> tuple[bool, str, str, str, str]:
        """A sort key: of several claims to one name, the lowest one holds it."""
        return self.is_leaving, self.since, self.namespace, self.deployment, self.adapter


def reported_claim(
    *,
    namespace: str,
    deployment: str,
    created: str,
    is_leaving: bool,
    recorded: tuple[str, str] | None,
    is_reported: bool,
    spec_name: str | None,
    adapter: str = "",
) -> Claim | None:
    """Return the claim that the status of an LLMDeployment proves, or None before the operator has reported anything.

    ``recorded`` is the name and the time in ``status.servedName``. Operators before 0.2 wrote a status without it
    (``is_reported``): then the name of the spec counts from the creation on.
    """
    if recorded is not None:
        name, since = recorded
    elif is_reported:
        name, since = spec_name or deployment, created
    else:
        return None
    return Claim(
        namespace=namespace, deployment=deployment, name=name, since=since, is_leaving=is_leaving, adapter=adapter
    )


def held_by(claims: Iterable[Claim], scope: NameScope) -> dict[str, list[Claim]]:
    """Return the claims to each name that clients use; the first one holds the name."""
    found: dict[str, list[Claim]] = {}
    for claim in sorted(claims, key=lambda claim: claim.order):
        found.setdefault(claim.requested_as(scope), []).append(claim)
    return found


def next_second(now: float) -> str:
    """Return the first whole second after Unix time ``now``, in RFC 3339.

    Rounding up makes a new claim younger than an object that the API server created in the same second.
    """
    return f"{datetime.fromtimestamp(int(now), UTC) + timedelta(seconds=1):%Y-%m-%dT%H:%M:%SZ}"
