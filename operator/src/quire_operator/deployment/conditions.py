"""The conditions of an LLMDeployment and their reasons, decided from all findings of a pass. Pure.

One function decides each condition, and the first finding that applies gives the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from quire_common.quantities import format_duration
from quire_common.served_names import Claim
from quire_operator.api import Autoscaling, AutoscalingMode, Rollout, RolloutStrategy, Spec
from quire_operator.api.deployment import HOSTNAME
from quire_operator.api.fields import JSON, Problem, items_of, text_of
from quire_operator.api.names import CACHE_CLAIM_SUFFIX
from quire_operator.autoscaling.schedules import Bounds
from quire_operator.canary.progress import REJECTED, Phase, Record
from quire_operator.deployment.desired import progress_deadline_seconds
from quire_operator.deployment.download import Download
from quire_operator.deployment.pod_failures import Failure, FailureReason, worst_failure
from quire_operator.deployment.repairs import other_autoscaler_message
from quire_operator.kube.objects import LEADER_WORKER_SET, DeploymentState, Pod
from quire_operator.kube.ownership import ForeignField

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


def rollout_advice(failure: Failure, deployment: DeploymentState | None, rules: Rollout) -> str:
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


READY, PROGRESSING, AVAILABLE = "Ready", "Progressing", "Available"
MODEL_LOADED, AUTOSCALING, DEGRADED = "ModelLoaded", "Autoscaling", "Degraded"
RECONCILING, STALLED = "Reconciling", "Stalled"
"""The conditions of kstatus, which Flux and helm read. Exactly one of Ready, Reconciling and Stalled is true."""
FOREIGN_FIELDS = "ForeignFields"
INVALID_SPEC = "InvalidSpec"
_MAX_MESSAGE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockingCondition:
    """A reason for which the desired state could not be applied."""

    reason: str
    message: str
    is_passing: bool = False
    """True if it can end without a change by a user."""

    @classmethod
    def invalid(cls, problems: Sequence[Problem]) -> "BlockingCondition":
        return cls(reason=INVALID_SPEC, message="; ".join(map(str, problems)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """The reason why a rollout does not start yet."""

    reason: str
    message: str


class MetricsReason(StrEnum):
    """Reasons of the condition Autoscaling while the autoscaler lacks metrics."""

    STALE = "MetricsStale"
    PROMETHEUS_UNAVAILABLE = "PrometheusUnavailable"
    GATEWAY_UNAVAILABLE = "GatewayUnavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsProblem:
    """The metrics that the autoscaler lacks, as the condition Autoscaling reports them."""

    reason: MetricsReason
    message: str


def last_metrics_problem(status: JSON) -> MetricsProblem | None:
    """Return the problem in the condition Autoscaling, which a new leader keeps until its own first tick."""
    for condition in items_of(status, "conditions"):
        if condition.get("type") == AUTOSCALING:
            reason = text_of(condition, "reason")
            if reason in frozenset(MetricsReason):
                return MetricsProblem(reason=MetricsReason(reason), message=text_of(condition, "message"))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    spec: Spec | None
    """None if the spec is invalid."""
    blocking: BlockingCondition | None
    target: int | None
    """The number of replicas to request; None while it is unknown."""
    deployment: DeploymentState | None
    pods: tuple[Pod, ...]
    """The replicas: their pods, or the leaders of groups."""
    additions: tuple[ForeignField, ...]
    contested: str | None
    """The field manager of another client that sets the number of replicas."""
    metrics_problem: MetricsProblem | None
    """The reason why the autoscaler holds."""
    nonblocking: BlockingCondition | None = None
    """The problem of a child that replicas can serve without."""
    rival: str | None = None
    """The reason why requests for the served name go to another LLMDeployment; None if they come to this one."""
    queued: Queued | None = None
    """The reason why a newer pod template replaces no replicas yet."""
    claim: Claim | None = None
    """The claim to the served name that the status records."""
    bounds: Bounds | None = None
    """The bounds of now; None without autoscaling."""
    download: Download | None = None
    """The progress of the model's download; None if no pod downloads."""
    canary: Record | None = None
    """The progress of strategy Canary; None without it."""
    rollout: JSON | None = None
    """``status.rollout``; None if this pass did not get that far."""
    workers: tuple[Pod, ...] = ()
    """The other pods of groups."""
    kept_failure: Failure | None = None
    """The cause for which a group was recreated, until all groups are ready."""
    fought_over: str = ""
    """The changes of other clients that come back whenever they are reverted."""


@dataclass(frozen=True, slots=True)
class ConditionState:
    type: str
    is_true: bool
    reason: str
    message: str


def conditions(view: View) -> tuple[ConditionState, ...]:
    """Return all conditions, in the order of the CRD."""
    failure = _advised(worst_failure((*view.pods, *view.workers), view.deployment) or view.kept_failure, view)
    ready = _ready(view, failure)
    stalled = _stalled(view, ready, failure)
    return (
        ready,
        _progressing(view, failure),
        _available(view, failure),
        _model_loaded(view, failure),
        _autoscaling(view),
        _degraded(view, failure),
        _reconciling(ready, stalled),
        stalled,
        _foreign_fields(view),
    )


def _advised(failure: Failure | None, view: View) -> Failure | None:
    if failure is None or view.spec is None:
        return failure
    advice = rollout_advice(failure, view.deployment, view.spec.rollout) or _advice_on_claim(failure, view.spec)
    return replace(failure, message=f"{failure.message}; {advice}") if advice else failure


def _advice_on_claim(failure: Failure, spec: Spec) -> str:
    """Return which claim and storage class a pod waits for, which the scheduler's message does not contain."""
    cache = spec.model.cache
    if failure.reason is not FailureReason.UNSCHEDULABLE or cache is None or not cache.is_created:
        return ""
    if "persistentvolumeclaim" not in failure.message.lower():
        return ""
    name, storage = f"{spec.name}{CACHE_CLAIM_SUFFIX}", cache.storage_class_name
    of_class = "the default storage class" if storage is None else f"storage class {storage}"
    return (
        f"the claim {name} of spec.model.cache has no volume of {of_class} yet: see kubectl get storageclass, and "
        f"kubectl describe pvc {name} -n {spec.namespace}"
    )


def merged(old: Sequence[JSON], new: Sequence[ConditionState], *, generation: int, now: str) -> list[dict[str, object]]:
    """Return the conditions for status. The transition time is kept if the status did not change."""
    known = {condition.get("type"): condition for condition in old}
    result = []
    for condition in new:
        before = known.get(condition.type, {})
        status = "True" if condition.is_true else "False"
        since = before.get("lastTransitionTime") if before.get("status") == status else None
        result.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:_MAX_MESSAGE],
                "observedGeneration": generation,
                "lastTransitionTime": since or now,
            }
        )
    return result


def _ready(view: View, failure: Failure | None) -> ConditionState:
    no = partial(ConditionState, READY, False)
    deployment = view.deployment
    if view.blocking is not None or view.spec is None:
        blocking = view.blocking or BlockingCondition(reason=INVALID_SPEC, message="")
        return no(blocking.reason, blocking.message)
    if view.rival is not None:
        return no("ServedNameConflict", view.rival)
    if deployment is None:
        return no("Creating", f"the {_workload(view.spec)} does not exist yet")
    if deployment.replicas_asked == 0:
        return _at_zero(view, view.spec)
    counts = standing(deployment, view.pods)
    if not deployment.is_rolling and deployment.ready >= _least_ready(view, view.spec, deployment):
        return ConditionState(READY, True, "Serving", counts)
    if failure is not None:
        return no(failure.reason, f"{counts}; {failure.message}")
    return no("RollingOut" if deployment.is_rolling and deployment.ready else "Starting", _with_download(counts, view))


def _workload(spec: Spec | None) -> str:
    return LEADER_WORKER_SET if spec is not None and spec.parallelism.is_group else "Deployment"


def _with_download(counts: str, view: View) -> str:
    return counts if view.download is None else f"{counts}; {view.download}"


def _at_zero(view: View, spec: Spec) -> ConditionState:
    """Return the condition Ready without replicas: true if none are requested and the next request can start one."""
    if view.target:
        return ConditionState(READY, False, "Starting", "no replica was requested yet")
    is_enforced = spec.autoscaling is not None and not spec.only_recommends
    if is_enforced and view.metrics_problem is not None:
        problem = view.metrics_problem
        return ConditionState(READY, False, problem.reason, problem.message)
    return ConditionState(READY, True, "ScaledToZero", _why_none(spec))


def _why_none(spec: Spec) -> str:
    if spec.autoscaling is None:
        return "spec.replicas is 0"
    if spec.only_recommends:
        return "there were no replicas when spec.autoscaling.mode became Recommend, which creates none"
    return "scaled to zero: no recent requests; the next request starts a replica"


def _least_ready(view: View, spec: Spec, deployment: DeploymentState) -> int:
    if spec.autoscaling is None:
        return max(1, spec.replicas, deployment.replicas_asked)
    # The autoscaler or a schedule may request more replicas than are ready; that does not affect those that serve. In
    # mode Recommend, nothing adds replicas, so fewer than the minimum are enough.
    scheduled = spec.autoscaling.min_replicas if view.bounds is None else view.bounds.min_replicas
    fewest = max(1, min(spec.autoscaling.min_replicas, scheduled))
    return min(fewest, deployment.replicas_asked) if spec.only_recommends else fewest


def _stalled(view: View, ready: ConditionState, failure: Failure | None) -> ConditionState:
    """Return the condition Stalled: true if the spec will not be reached without a change by a user."""
    blocking, deployment = view.blocking, view.deployment
    is_blocked = blocking is not None and not blocking.is_passing
    is_late = blocking is None and deployment is not None and is_overdue(deployment)
    if not ready.is_true and view.spec is not None and is_late and deployment is not None:
        message = overdue(deployment, view.pods, deadline_seconds=progress_deadline_seconds(view.spec), failure=failure)
        return ConditionState(STALLED, True, FailureReason.DEADLINE_EXCEEDED, message)
    if not ready.is_true and (is_blocked or view.spec is None or view.rival is not None):
        return ConditionState(STALLED, True, ready.reason, ready.message)
    return ConditionState(STALLED, False, "AsExpected", "no change by a person is needed")


def _reconciling(ready: ConditionState, stalled: ConditionState) -> ConditionState:
    if ready.is_true or stalled.is_true:
        reason = "Stalled" if stalled.is_true else "Complete"
        message = "see the condition Stalled" if stalled.is_true else "the deployment is as specified"
        return ConditionState(RECONCILING, False, reason, message)
    return ConditionState(RECONCILING, True, ready.reason, ready.message)


def _foreign_fields(view: View) -> ConditionState:
    """Return the condition ForeignFields, which is no fault: admission policies and other controllers add fields."""
    if not view.additions:
        return ConditionState(FOREIGN_FIELDS, False, "NoneFound", "other clients added no fields")
    message = f"other clients added {', '.join(map(str, view.additions))}"
    return ConditionState(FOREIGN_FIELDS, True, "FieldsAdded", message)


def _progressing(view: View, failure: Failure | None) -> ConditionState:
    deployment = view.deployment
    is_true, reason, message = True, "Creating", f"the {_workload(view.spec)} is being created"
    if view.blocking is not None:
        is_true, reason, message = False, view.blocking.reason, "the spec was not applied; see the condition Ready"
    elif deployment is not None and view.spec is not None and is_overdue(deployment):
        is_true, reason = False, FailureReason.DEADLINE_EXCEEDED
        seconds = progress_deadline_seconds(view.spec)
        message = overdue(deployment, view.pods, deadline_seconds=seconds, failure=failure)
    elif failure is not None:
        is_true, reason, message = False, failure.reason, failure.message
    elif view.queued is not None:
        reason, message = view.queued.reason, view.queued.message
    elif view.canary is not None and view.canary.phase in (Phase.STARTING, Phase.CANARY):
        reason, message = "Canary", view.canary.message
    elif view.canary is not None and view.canary.phase in REJECTED:
        is_true, reason, message = False, f"Canary{view.canary.phase}", view.canary.message
    elif deployment is not None:
        finished = not deployment.is_rolling and deployment.ready >= deployment.replicas_asked
        done = finished and deployment.replicas == deployment.replicas_asked
        is_true, reason = (False, "Complete") if done else (True, "RollingOut" if deployment.is_rolling else "Scaling")
        message = _with_download(standing(deployment, view.pods), view)
        if deployment.is_rolling and view.spec is not None and view.spec.replaces_in_place:
            message = f"{message}; {IN_PLACE}"
    return ConditionState(PROGRESSING, is_true, reason, message)


def _available(view: View, failure: Failure | None) -> ConditionState:
    ready = 0 if view.deployment is None else view.deployment.ready
    if ready:
        return ConditionState(AVAILABLE, True, "ReplicaReady", "at least one replica serves requests")
    if _is_held_for(view, failure):
        message = "no replica is running; the gateway holds requests until one is ready"
        return ConditionState(AVAILABLE, True, "HeldByGateway", message)
    return ConditionState(AVAILABLE, False, "NoReplicaReady", "no replica serves requests")


def _is_held_for(view: View, failure: Failure | None) -> bool:
    """Return True if a request would now be answered without a ready replica: the gateway holds it and one starts."""
    autoscaling = None if view.spec is None else view.spec.autoscaling
    if autoscaling is None or not autoscaling.may_reach_zero or autoscaling.mode is not AutoscalingMode.ENFORCE:
        return False
    hindered = view.blocking is not None or failure is not None or view.metrics_problem is not None
    return view.deployment is not None and not hindered


_MODEL_FAILURES = frozenset(
    {
        FailureReason.MODEL_DOWNLOAD_FAILED,
        FailureReason.OUT_OF_MEMORY,
        FailureReason.ENGINE_REFUSED,
        FailureReason.CRASH_LOOPING,
    }
)


def _model_loaded(view: View, failure: Failure | None) -> ConditionState:
    is_true, reason, message = False, "NoReplica", "no replica exists to load the model"
    if any(pod.ready for pod in view.pods):
        is_true, reason, message = True, "Loaded", "a replica has generated a token with the model"
    elif failure is not None and failure.reason in _MODEL_FAILURES:
        reason, message = failure.reason, failure.message
    elif view.pods:
        reason, message = "Loading", str(view.download or "no replica has loaded the model yet")
    return ConditionState(MODEL_LOADED, is_true, reason, message)


def _autoscaling(view: View) -> ConditionState:
    is_true, reason, message = False, "NotConfigured", _without_autoscaling(view)
    autoscaling = None if view.spec is None else view.spec.autoscaling
    if view.spec is None:
        reason, message = INVALID_SPEC, "the spec is invalid"
    elif view.contested is not None:
        reason = "ReplicasContested"
        message = other_autoscaler_message(view.contested, view.spec.name, autoscaling=autoscaling is not None)
    elif autoscaling is not None and view.metrics_problem is not None:
        reason, message = view.metrics_problem.reason, view.metrics_problem.message
    elif autoscaling is not None:
        is_true, enforced = True, autoscaling.mode is AutoscalingMode.ENFORCE
        reason = "Enforcing" if enforced else "Recommending"
        bounds = _bounds_text(autoscaling, view.bounds)
        if view.spec.parallelism.is_group:
            bounds = f"{bounds}; a scale-down removes the group with the highest index, as LeaderWorkerSets do"
        message = bounds if enforced else f"recommends without applying; {bounds}"
    return ConditionState(AUTOSCALING, is_true, reason, message)


def _bounds_text(autoscaling: Autoscaling, bounds: Bounds | None) -> str:
    found = bounds or Bounds(min_replicas=autoscaling.min_replicas, max_replicas=autoscaling.max_replicas)
    why = "" if found.why is None else f"; {found.why}"
    return f"between {found.min_replicas} and {found.max_replicas} replicas{why}"


def _without_autoscaling(view: View) -> str:
    if view.spec is None or view.target is None or view.target <= view.spec.replicas:
        return "spec.autoscaling is not set"
    return (
        f"spec.autoscaling was removed; its {view.target} replicas stay until spec.replicas, "
        f"which is {view.spec.replicas}, is changed"
    )


def _degraded(view: View, failure: Failure | None) -> ConditionState:
    is_true, reason, message = True, "AsExpected", ""
    if view.blocking is not None:
        reason, message = view.blocking.reason, view.blocking.message
    elif failure is not None:
        reason, message = failure.reason, failure.message
    elif view.rival is not None:
        reason, message = "ServedNameConflict", view.rival
    elif view.canary is not None and view.canary.phase in REJECTED:
        reason, message = f"Canary{view.canary.phase}", view.canary.message
    elif view.nonblocking is not None:
        reason, message = view.nonblocking.reason, view.nonblocking.message
    elif view.fought_over:
        reason, message = "FieldsContested", view.fought_over
    else:
        is_true, message = False, "no problems found"
    return ConditionState(DEGRADED, is_true, reason, message)


def unshared_cache(spec: Spec) -> Problem | None:
    """Return why replicas may be unable to mount the cache; None if they can."""
    if not spec.has_one_node_cache:
        return None
    most = spec.max_replicas
    if spec.parallelism.is_group and most:
        why = f"a replica has {spec.parallelism.nodes} pods: those on other nodes never start"
        remedy = "set spec.parallelism.nodes to 1"
    elif most >= 2:
        why = f"up to {most} replicas may run: those on other nodes never start"
        remedy = "allow only one replica"
    elif spec.rollout.strategy is RolloutStrategy.CANARY and most:
        why = "strategy Canary runs the old and the new replica at once: a canary on another node never starts"
        remedy = "set spec.rollout.strategy to RollingUpdate"
    else:
        return None
    return Problem(
        path="spec.model.cache.accessMode",
        message=(
            f"a ReadWriteOnce volume can be mounted on one node only, but {why}. Set ReadWriteMany, use an oci:// "
            f"model without a cache, {remedy}, or select one node by {HOSTNAME} in "
            "spec.podTemplate.spec.nodeSelector"
        ),
    )


def cache_refusal(spec: Spec, *, was_let_in: bool) -> tuple[BlockingCondition | None, BlockingCondition | None]:
    """Return the blocking and the non-blocking condition for a cache that replicas cannot share.

    A spec that was applied already is not refused: an upgrade of the operator must not stop what runs.
    """
    problem = unshared_cache(spec)
    if problem is None:
        return None, None
    if was_let_in:
        return None, BlockingCondition(reason="CacheNotShared", message=str(problem))
    return BlockingCondition.invalid([problem]), None
