"""The progress of a rollout, and advice for one that is stuck: pure.

It feeds ``conditions``. Kubernetes' Deployment replaces the replicas; this module only describes what its counts and
the pods of its newest template show.
"""

from collections.abc import Sequence

from quire_common.quantities import format_duration
from quire_operator.domain.cluster_state.observed import DeploymentState, Pod
from quire_operator.domain.resource import Rollout, RolloutStrategy
from quire_operator.domain.status.pod_failures import Failure, FailureReason

IN_PLACE = (
    "the old replica is stopped before the new one starts, because one node mounts the ReadWriteOnce volume of "
    "spec.model.cache: set accessMode ReadWriteMany, or select one node by kubernetes.io/hostname in "
    "spec.podTemplate.spec.nodeSelector, to serve in between"
)
"""The reason why a rollout of one replica interrupts serving."""


def is_overdue(deployment: DeploymentState) -> bool:
    """Return True if no further replica became ready within the progress deadline."""
    progressing = deployment.progressing
    return progressing is not None and progressing.reason == "ProgressDeadlineExceeded" and not progressing.is_true


def standing(deployment: DeploymentState, pods: Sequence[Pod]) -> str:
    """Return the progress in one sentence without a full stop, which changes only with a count."""
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
    """Return the message for a rollout that exceeded its deadline: where it stopped, why, and what to do."""
    late = f"no further replica became ready within {format_duration(deadline_seconds)} (spec.rollout.progressDeadline)"
    is_told = failure is not None and failure.reason is not FailureReason.DEADLINE_EXCEEDED
    cause = f"; {failure.message}" if failure is not None and is_told else ""
    if not deployment.is_rolling:
        return f"{late}; {standing(deployment, pods)}{cause}"
    keeps = deployment.replicas > deployment.updated
    then = "replicas of the previous revision continue to serve; " if keeps else ""
    where = f"{standing(deployment, pods)}{cause}"
    return f"the rollout has stopped: {late}; {where}; {then}correct the spec or revert it"


def advice(failure: Failure, deployment: DeploymentState | None, rules: Rollout) -> str:
    """Return how a rollout that lacks GPUs can continue, or ""."""
    if failure.reason is not FailureReason.INSUFFICIENT_GPU or deployment is None:
        return ""
    keeps_all = rules.max_unavailable in (0, "0%")
    surges = rules.strategy is RolloutStrategy.ROLLING_UPDATE and rules.surges and keeps_all
    if not surges or not deployment.is_rolling or deployment.replicas <= deployment.replicas_asked:
        return ""
    return (
        f"no node has enough free GPUs for the additional replica (spec.rollout.maxSurge: {rules.max_surge}); "
        "set maxSurge: 0 and maxUnavailable: 1 to replace replicas one by one"
    )


def _newest(deployment: DeploymentState, pods: Sequence[Pod]) -> list[Pod]:
    """Return the pods of the newest template, which are the ones created last."""
    live = [pod for pod in pods if not pod.deleting]
    if not deployment.updated or not live:
        return []
    latest = max(
        live, key=lambda pod: (pod.created, sum(p.revision == pod.revision for p in live) == deployment.updated)
    )
    return [pod for pod in live if pod.revision == latest.revision]
