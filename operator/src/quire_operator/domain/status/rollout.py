"""Where a rollout stands, and what would let one that is stuck go on: pure.

Feeds ``conditions``. Kubernetes' Deployment replaces the replicas; here is only told what can be seen of that: from its
counts, and from which pods are of its newest template.
"""

from collections.abc import Sequence

from quire_common.quantities import format_duration
from quire_operator.domain.cluster_state.observed import DeploymentState, Pod
from quire_operator.domain.resource import Rollout, RolloutStrategy
from quire_operator.domain.status.pod_failures import Failure, FailureReason


def is_overdue(deployment: DeploymentState) -> bool:
    """Whether no replica more became ready for as long as a rollout may take for one."""
    progressing = deployment.progressing
    return progressing is not None and progressing.reason == "ProgressDeadlineExceeded" and not progressing.is_true


def standing(deployment: DeploymentState, pods: Sequence[Pod]) -> str:
    """How far it is, in one sentence without a full stop; it changes only when a count does."""
    asked = deployment.replicas_asked
    if not deployment.is_rolling:
        return f"{deployment.ready} of {asked} replicas are ready"
    new = _newest(deployment, pods)
    new_ready = sum(pod.ready for pod in new)
    old, old_ready = max(0, deployment.replicas - deployment.updated), max(0, deployment.ready - new_ready)
    updated = (
        f"{min(deployment.updated, asked)} of {asked} replicas have the newest revision, {new_ready} of them ready"
    )
    return f"{updated}; {old} of the previous revision remain, {old_ready} ready" if old else updated


def overdue(
    deployment: DeploymentState, pods: Sequence[Pod], *, deadline_seconds: float, failure: Failure | None
) -> str:
    """What is to be said of one that has not gone on for too long: where it stopped, why, and what now."""
    late = f"no further replica became ready within {format_duration(deadline_seconds)} (spec.rollout.progressDeadline)"
    is_told = failure is not None and failure.reason is not FailureReason.DEADLINE_EXCEEDED
    cause = f"; {failure.message}" if failure is not None and is_told else ""
    if not deployment.is_rolling:
        return f"{late}; {standing(deployment, pods)}{cause}"
    keeps = deployment.replicas > deployment.updated
    then = "replicas of the previous revision continue to serve; " if keeps else ""
    where = f"{standing(deployment, pods)}{cause}"
    return f"the rollout has stopped: {late}; {where}; {then}correct the spec or revert it"


def advice(failure: Failure, deployment: DeploymentState | None, rules: Rollout | None) -> str:
    """What a person could change so that a rollout goes on where it lacks a GPU; empty where nothing is known to."""
    if failure.reason is not FailureReason.INSUFFICIENT_GPU or deployment is None or rules is None:
        return ""
    surges = rules.strategy is RolloutStrategy.ROLLING_UPDATE and rules.max_surge > 0 and rules.max_unavailable == 0
    if not surges or not deployment.is_rolling or deployment.replicas <= deployment.replicas_asked:
        return ""
    return (
        f"no node has a free GPU for the additional replica (spec.rollout.maxSurge: {rules.max_surge}); "
        "set maxSurge: 0 and maxUnavailable: 1 to replace replicas one by one"
    )


def _newest(deployment: DeploymentState, pods: Sequence[Pod]) -> list[Pod]:
    """Pods of the newest template: those made last are, once there are any."""
    live = [pod for pod in pods if not pod.deleting]
    if not deployment.updated or not live:
        return []
    latest = max(
        live, key=lambda pod: (pod.created, sum(p.revision == pod.revision for p in live) == deployment.updated)
    )
    return [pod for pod in live if pod.revision == latest.revision]
