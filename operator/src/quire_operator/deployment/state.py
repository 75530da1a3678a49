"""The reconcile state: what the process knows about one LLMDeployment from pass to pass, in addition to the store.

All of it can be lost: after a crash the next process reads and writes once more.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from quire_common.served_names import Claim
from quire_operator.autoscaling.history import ScalingNotDone, ScalingRecord
from quire_operator.canary.tracks import Tracked
from quire_operator.deployment.conditions import BlockingCondition, MetricsProblem, Queued, last_metrics_problem
from quire_operator.deployment.groups import GroupFailure
from quire_operator.deployment.plan import Action, Applied
from quire_operator.deployment.repairs import OtherAutoscaler, RepairLog
from quire_operator.kube.errors import Forbidden, QuotaExceeded, Refused
from quire_operator.kube.objects import Key, Ref, Resource
from quire_operator.kube.ownership import ForeignField

REFUSED_SECONDS = 60.0
"""The interval at which a rejected action is tried again."""


@dataclass(slots=True)
class Persist:
    """A record of the autoscaler that waits to be written."""

    record: ScalingRecord
    done: asyncio.Future[None]

    def settle(self, error: ScalingNotDone | None) -> None:
        """Complete the future of the waiting caller."""
        if not self.done.done():
            self.done.set_result(None) if error is None else self.done.set_exception(error)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRejection:
    digest: str
    """The digest of the rejected action."""
    message: str
    at: float

    def wait_seconds(self, now: float) -> float:
        """Return for how long the rejection counts: its cause, such as an admission policy, may disappear."""
        passed = now - self.at
        return REFUSED_SECONDS - passed if 0.0 <= passed < REFUSED_SECONDS else 0.0


@dataclass(slots=True)
class ReconcileState:
    uid: str
    passes: int = 0
    """The passes of this process, with the present one."""
    is_unread: bool = False
    """True in a pass that read no children, so that it may only create those whose names are free."""
    applied: dict[Ref, Applied] = field(default_factory=dict)
    refused: dict[tuple[Ref, type[Action]], ApiRejection] = field(default_factory=dict)
    """The rejections by child and kind of action: what cannot be changed may be recreated."""
    decided: int | None = None
    victims: tuple[str, ...] = ()
    persist: Persist | None = None
    metrics_problem: MetricsProblem | None = None
    other_autoscaler: OtherAutoscaler | None = None
    repairs: RepairLog = field(default_factory=RepairLog)
    conflicts: int = 0
    """Conflicts in a row: a few mean that other clients were faster, more need a pause."""
    status: tuple[Mapping[str, object], Mapping[str, object]] | None = None
    """The status that was written last, and the one that the server stored."""
    written_at: float = 0.0
    """The time of the last write of the status; 0 before the first one."""

    tried_template: str = ""
    """The digest of the template of groups that the API server accepted in a dry run."""
    group_secret: str = ""
    """The name of the Secret of groups that this process created or found."""
    group_failure: GroupFailure | None = None
    """The cause for which a group was recreated, while groups are not ready."""

    claim: Claim | None = None
    """The claim to the served name that this process recorded last. It outlasts edits of the status by others."""

    def give_up_persisting(self, why: str) -> None:
        if self.persist is not None:
            self.persist.settle(ScalingNotDone(why))
            self.persist = None


class ReconcileStates(dict[Key, ReconcileState]):
    def of(self, resource: Resource) -> ReconcileState:
        """Return the state of this LLMDeployment, which is new if an earlier one had its name."""
        state = self.get(resource.key)
        if state is None or state.uid != resource.uid:
            state = ReconcileState(uid=resource.uid, metrics_problem=last_metrics_problem(resource.status))
            self[resource.key] = state
        return state


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileResult:
    """The result of a pass. Without a blocking condition, everything is applied or in progress."""

    blocking: BlockingCondition | None = None
    nonblocking: BlockingCondition | None = None
    """The condition of children that replicas can serve without."""
    target: int | None = None
    queued: Queued | None = None
    tracked: Tracked | None = None
    """The tracks of strategy Canary."""
    additions: tuple[ForeignField, ...] = ()
    again_seconds: float | None = None
    """The time of the next pass if nothing changes before."""

    def again_within(self, seconds: float | None) -> "ReconcileResult":
        """Return the same result with a next pass after ``seconds`` at the latest."""
        return replace(self, again_seconds=soonest(seconds, self.again_seconds))


def rejection(what: str, error: Refused | QuotaExceeded | Forbidden) -> BlockingCondition:
    """Return the condition for a trial or a write that the API server rejected."""
    return BlockingCondition(
        reason="InvalidSpec" if isinstance(error, Refused) else type(error).__name__,
        message=f"the API server rejected {what}: {error}",
        is_passing=isinstance(error, QuotaExceeded),
    )


def soonest(*waits: float | None) -> float | None:
    """Return the shortest of several waits; None means no wait."""
    return min((seconds for seconds in waits if seconds is not None), default=None)
