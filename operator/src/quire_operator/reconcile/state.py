"""What the operator's process remembers of one LLMDeployment from pass to pass, beside what the watches have shown.

Kept by ``reconcile``; all of it can be lost: whoever comes after a crash looks and writes once more.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire_common.served_names import Claim
from quire_operator.domain.autoscaling.history import ScalingRecord
from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.cluster_state.other_autoscalers import OtherAutoscaler
from quire_operator.domain.cluster_state.ownership import ForeignField
from quire_operator.domain.convergence.plan import Action, Applied
from quire_operator.domain.convergence.repairs import RepairLog
from quire_operator.domain.status.conditions import BlockingCondition, MetricsProblem, Queued
from quire_operator.ports import ScalingNotDone

REFUSED_SECONDS = 60.0
"""How often something is asked for again that was refused."""


@dataclass(slots=True)
class Persist:
    """A record of the autoscaler that waits to be written."""

    record: ScalingRecord
    done: asyncio.Future[None]

    def settle(self, error: ScalingNotDone | None) -> None:
        """Tell whoever waits for it."""
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """What the API server would not do, and said of it."""

    digest: str
    """Of what it was asked to do."""
    message: str
    at: float

    def wait_seconds(self, now: float) -> float:
        """For how long the answer counts: what refused it may be gone by then, such as an admission policy."""
        passed = now - self.at
        return REFUSED_SECONDS - passed if 0.0 <= passed < REFUSED_SECONDS else 0.0


@dataclass(slots=True)
class ReconcileState:
    """What this process knows of one LLMDeployment beside the store; all of it can be lost."""

    uid: str
    applied: dict[Ref, Applied] = field(default_factory=dict)
    refused: dict[tuple[Ref, type[Action]], Refusal] = field(default_factory=dict)
    """By child and by what was to be done to it: what can't be changed may yet be made anew."""
    decided: int | None = None
    victims: tuple[str, ...] = ()
    persist: Persist | None = None
    metrics_problem: MetricsProblem | None = None
    other_autoscaler: OtherAutoscaler | None = None
    repairs: RepairLog = field(default_factory=RepairLog)
    conflicts: int = 0
    """In a row: a few are others who were quicker, more are worth a pause."""
    status: tuple[Mapping[str, object], Mapping[str, object]] | None = None
    """What was written last, and what the server made of it."""

    claim: Claim | None = None
    """The claim to the served name that this process recorded last. It outlasts edits of the status by others."""

    def give_up_persisting(self, why: str) -> None:
        if self.persist is not None:
            self.persist.settle(ScalingNotDone(why))
            self.persist = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """Without a blocker all was done, or is under way."""

    blocking: BlockingCondition | None = None
    nonblocking: BlockingCondition | None = None
    """The same of what replicas serve without."""
    target: int | None = None
    queued: Queued | None = None
    additions: tuple[ForeignField, ...] = ()
    again_seconds: float | None = None
    """When another pass is wanted though nothing changes."""


def soonest(one: float | None, other: float | None) -> float | None:
    """Of two waits the shorter one; None is none at all."""
    return min((seconds for seconds in (one, other) if seconds is not None), default=None)
