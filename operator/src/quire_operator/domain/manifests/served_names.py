"""Which of several LLMDeployments has a served name that all of them ask for: the oldest. Pure.

One gateway may serve them all, and a request names but a model. Services say what they serve and how old their
LLMDeployment is; the operator judges by what the gateway sees, in the same order (tests/contract holds them equal), so
that status never says otherwise than where requests go.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire_operator.domain.cluster_state.observed import Key


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A Service that says it serves a model."""

    key: Key
    """The LLMDeployment it belongs to."""
    served_name: str
    seniority: str
    """When the LLMDeployment was made, and its uid; of a Service that does not say so, when that was made."""

    @property
    def _order(self) -> tuple[str, str]:
        return self.seniority, str(self.key)

    def goes_before(self, other: "Claim") -> bool:
        return self._order < other._order


def seniority(created: str, uid: str) -> str:
    """Text that sorts as age does; ``created`` is an RFC 3339 time of the API server, always in UTC."""
    return f"{created}/{uid}"


def conflict(mine: Claim | None, claims: Iterable[Claim]) -> str | None:
    """Why requests for my served name go to somebody else; None if they come to me."""
    older = [claim for claim in claims if mine is not None and claim != mine and claim.goes_before(mine)]
    if mine is None or not older:
        return None
    first = min(older, key=lambda claim: claim._order)
    return (
        f"requests for the model {mine.served_name} go to {first.key}, which serves it and is older; "
        "choose another spec.model.servedName. Its own Service works all the same"
    )
