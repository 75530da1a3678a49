"""The decisions that only replicas which are groups of pods need: a missing kind, progress, and causes. Pure.

LeaderWorkerSets report no failed rollout, and recreate all pods of a group as soon as a container of one restarts. So
the deadline of a rollout is counted here, and the cause of a restart is kept until the group is ready again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire_operator.api import Spec
from quire_operator.api.fields import parse_time
from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.deployment.manifests import ClusterFeatures
from quire_operator.deployment.pod_failures import Failure, FailureReason
from quire_operator.kube.objects import LEADER_WORKER_SET, Condition, DeploymentState, Pod, Ref

INSTALL = (
    "kubectl apply --server-side -f https://github.com/kubernetes-sigs/lws/releases/download/v0.9.0/manifests.yaml"
)
"""The command that installs LeaderWorkerSets."""
KIND_MISSING = "LeaderWorkerSetMissing"
_CONTROLLER = "kubectl get pods -n lws-system"
SILENT_SECONDS = 60.0
"""The time after which a controller that has not observed a LeaderWorkerSet counts as absent."""
UNSETTLED_SECONDS = 3.0
"""The interval at which a LeaderWorkerSet is read while groups are not as requested, because no watch shows it."""
_KEPT = frozenset(
    {
        FailureReason.MODEL_DOWNLOAD_FAILED,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.ENGINE_REFUSED,
        FailureReason.CRASH_LOOPING,
        FailureReason.POD_FAILED,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupFailure:
    """The last cause for which a group was recreated, and the template of its pods."""

    template_digest: str
    failure: Failure


def missing_kind(spec: Spec, features: ClusterFeatures) -> BlockingCondition | None:
    """Return why no groups can be created in this cluster; None if they can, or if none are needed."""
    if not spec.parallelism.is_group or LEADER_WORKER_SET in features.served_kinds:
        return None
    return BlockingCondition(
        reason=KIND_MISSING,
        message=f"spec.parallelism.nodes is {spec.parallelism.nodes}, and groups of pods are LeaderWorkerSets, which "
        f"this cluster does not serve; install them with: {INSTALL} (if they are installed, the operator's role lacks "
        "the permission to list leaderworkersets)",
    )


def unanswered_webhook(ref: Ref, error: str) -> BlockingCondition | None:
    """Return the condition for a LeaderWorkerSet that its controller could not check; None for another error."""
    if ref.kind != LEADER_WORKER_SET or "failed calling webhook" not in error:
        return None
    return BlockingCondition(
        reason="LeaderWorkerSetFailed",
        message=f"the controller of LeaderWorkerSets does not answer; check that it runs: {_CONTROLLER}: {error}",
        is_passing=True,
    )


def is_settled(state: DeploymentState) -> bool:
    """Return True if all groups that are requested are there and ready, and no others."""
    is_observed = state.observed_generation >= state.generation
    return is_observed and not state.is_rolling and state.ready == state.replicas_asked == state.replicas


def judged(state: DeploymentState | None, pods: Sequence[Pod], *, now: float) -> DeploymentState | None:
    """Return the state with the conditions that the controller of LeaderWorkerSets does not report.

    ``pods`` are the leaders. A Deployment is returned as it is.
    """
    if state is None or not state.deadline_seconds:
        return state
    # Pods show sooner than the status of their set that a leader is gone.
    state = replace(state, ready=min(state.ready, sum(pod.ready and not pod.deleting for pod in pods)))
    if is_settled(state):
        return state
    changed = parse_time(state.changed) or now
    if state.observed_generation < state.generation and now - changed > SILENT_SECONDS:
        silence = (
            f"the controller of LeaderWorkerSets has not acted for {SILENT_SECONDS:g} s; check that it runs: "
            f"{_CONTROLLER}"
        )
        return replace(state, failure=Condition(is_true=True, reason="ControllerSilent", message=silence))
    if (state.is_rolling or not state.ready) and now - _last_progress(state, pods, changed) > state.deadline_seconds:
        late = Condition(is_true=False, reason="ProgressDeadlineExceeded", message="no further group became ready")
        return replace(state, progressing=late)
    return state


def _last_progress(state: DeploymentState, pods: Sequence[Pod], changed: float) -> float:
    times = [pod.ready_changed for pod in pods if pod.ready]
    if not state.is_rolling:
        # Without a rollout, groups that were lost have as much time as new ones.
        times += [time for pod in pods for time in (pod.created, pod.ready_changed)]
    return max([changed, *(parse_time(time) or changed for time in times)])


def kept_failure(
    before: GroupFailure | None, seen: Failure | None, state: DeploymentState | None
) -> GroupFailure | None:
    """Return the cause to report while a group is recreated; None once all are ready or another template is applied."""
    if state is None or state.nodes == 1 or state.ready >= state.replicas_asked:
        return None
    if seen is not None and seen.reason in _KEPT:
        return GroupFailure(template_digest=state.template_digest, failure=seen)
    return before if before is not None and before.template_digest == state.template_digest else None
