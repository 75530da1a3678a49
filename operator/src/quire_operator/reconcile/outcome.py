"""What one pass over an LLMDeployment came to: ``executor`` finds it out, ``reporting`` says it."""

from dataclasses import dataclass

from quire_operator.domain.cluster_state.ownership import ForeignField
from quire_operator.domain.status.conditions import Blocker


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Without a blocker all was done, or is under way."""

    blocker: Blocker | None = None
    aside: Blocker | None = None
    """The same of what replicas serve without."""
    target: int | None = None
    additions: tuple[ForeignField, ...] = ()
    again_seconds: float | None = None
    """When another pass is wanted though nothing changes."""


def soonest(one: float | None, other: float | None) -> float | None:
    """Of two waits the shorter one; None is none at all."""
    return min((seconds for seconds in (one, other) if seconds is not None), default=None)
