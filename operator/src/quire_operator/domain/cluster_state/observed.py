"""The observed objects, reduced to a few fields each, so that thousands fit in memory.

``handlers`` and ``reconcile`` create them from raw objects (``trim_*``), ``store`` keeps them, and ``plan`` and
``status`` read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quire_common.contract.engine import FETCHED_VERSION
from quire_operator.domain.cluster_state.ownership import (
    ForeignField,
    fingerprint,
    foreign_fields,
    managed_fields,
    own_entry_time,
)
from quire_operator.domain.resource.names import (
    ADAPTER_KIND,
    ANNOTATION_PROGRESS_DEADLINE,
    ANNOTATION_REFRESH_MODEL,
    ANNOTATION_ROLLOUT_NOW,
    ANNOTATION_TEMPLATE,
    API_VERSION,
    CANARY_COMPONENT,
    CANARY_SUFFIX,
    GROUP_SUFFIX,
    KIND,
    LABEL_COMPONENT,
    LABEL_DEPLOYMENT,
    LABEL_GROUP_INDEX,
    LABEL_GROUP_REVISION,
    WORKER_COMPONENT,
)

JSON = Mapping[str, object]
_MAX_ANNOTATION, _MAX_VERSION = 128, 128
_PAUSED = ("f:spec", "f:paused")
LEADER_WORKER_SET = "LeaderWorkerSet"
HELD_PARTITION = 2**31 - 1
"""The partition of a LeaderWorkerSet whose groups keep their template: updates begin at the group with this index."""
_PARTITION = ("f:spec", "f:rolloutStrategy", "f:rollingUpdateConfiguration", "f:partition")

_FILLED_IN_BY_KUBERNETES = frozenset({"PersistentVolumeClaim"})
"""Kinds whose spec Kubernetes' own controllers write (such as a claim's volume): foreign fields there are expected."""


@dataclass(frozen=True, slots=True)
class Key:
    """The namespace and name of an LLMDeployment."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    @classmethod
    def parse(cls, text: str) -> "Key":
        namespace, _, name = text.partition("/")
        return cls(namespace, name)


@dataclass(frozen=True, slots=True)
class Ref:
    """The kind and name of a child, in the namespace of its LLMDeployment."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """An LLMDeployment or LLMAdapter as it is in the cluster, without its managed fields."""

    key: Key
    uid: str
    version: str
    generation: int
    deleting: bool
    body: JSON
    """The input of ``Spec.parse``: kind, names and spec."""
    status: JSON
    created: str = ""
    """The time of creation in RFC 3339; empty for an object that is not stored yet."""
    refresh_model: str = ""
    """The annotation that makes the operator resolve the model's source again."""
    rollout_now: str = ""
    """The annotation that lets one rollout start outside its windows."""
    defaults: tuple[tuple[str, str], ...] = ()
    """The fields of ``body`` that have a default of the namespace or the cluster, each with its ConfigMap."""
    defaults_problem: str = ""
    """The problem of other defaults, which therefore do not apply; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The controller in an object's owner references."""

    kind: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """The fields that we read of a condition that another controller set."""

    is_true: bool
    reason: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentState:
    """The requested state of a Deployment or LeaderWorkerSet and the progress of its controller.

    All counts are replicas: a group of pods counts once.
    """

    replicas_asked: int
    generation: int
    observed_generation: int
    replicas: int
    updated: int
    ready: int
    available: int
    revision: str
    progressing: Condition | None
    failure: Condition | None
    """The condition ReplicaFailure: pods cannot be created."""
    template_digest: str = ""
    """The digest of the pod template that we applied last; empty if an older operator applied it."""
    is_held: bool = False
    """True if we paused it, so that its newest template replaces no pods yet."""
    nodes: int = 1
    """The number of pods of a replica; those of a LeaderWorkerSet have several."""
    changed: str = ""
    """The time at which we last changed a LeaderWorkerSet; empty for a Deployment."""
    deadline_seconds: int = 0
    """The progress deadline of a LeaderWorkerSet, which its controller does not know; 0 for a Deployment."""

    @property
    def is_rolling(self) -> bool:
        """True if pods of an older template remain, or the controller has not observed the newest one yet."""
        return not self.is_held and (self.observed_generation < self.generation or self.updated < self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """An object that belongs to an LLMDeployment, or has the name of one of its children."""

    ref: Ref
    uid: str
    version: str
    owner: Owner | None
    deleting: bool
    fingerprint: str
    foreign: tuple[ForeignField, ...]
    deployment: DeploymentState | None = None
    owner_uids: frozenset[str] = frozenset()
    """All its owners, of which the controller is one; it is removed when the last of them is gone."""
    data: JSON | None = None
    """The content of a ControllerRevision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerState:
    """The reason why a container does not run, or how it last ended; empty strings if it runs well."""

    name: str
    init: bool
    ready: bool
    restarts: int
    waiting_reason: str = ""
    waiting_message: str = ""
    ended_reason: str = ""
    ended_message: str = ""
    ended_code: int = 0
    running: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """A replica, or one of the pods of a replica that is a group."""

    name: str
    uid: str
    version: str
    ip: str
    phase: str
    ready: bool
    deleting: bool
    revision: str
    """The hash of the pod template from which it was created."""
    created: str
    unschedulable: str
    """The scheduler's message, or ""."""
    containers: tuple[ContainerState, ...]
    deletion_cost: str
    failed: str = ""
    """The reason why the kubelet ended it for good (evicted, no device left), or ""."""
    model_version: str = ""
    """The version that its download reported; empty without a download and while it runs."""
    is_canary: bool = False
    is_worker: bool = False
    """True if it belongs to a group and is not its leader, which stands for the replica."""
    group: str = ""
    """The index of its group; empty for a replica of one pod."""
    ready_changed: str = ""
    """The time at which it became ready or lost readiness; empty before the first report of its kubelet."""


def is_newer(version: str, than: str) -> bool:
    """Return True if a resourceVersion is later than another of the same kind (comparable since Kubernetes 1.35)."""
    if version.isdecimal() and than.isdecimal():
        return int(version) > int(than)
    return version != than


def key_of_child(body: JSON) -> Key | None:
    """Return the LLMDeployment that an object belongs to: its owner, else the one that its label names."""
    metadata = _map(body, "metadata")
    owner = _controller(metadata)
    name: object = _map(metadata, "labels").get(LABEL_DEPLOYMENT)
    if owner is not None and owner.kind == KIND:
        name = owner.name  # the owner decides, so that an edit of the label does not hide the object
    return Key(_text(metadata, "namespace"), name) if isinstance(name, str) else None


def own_deployment(
    resource: Resource, children: Mapping[Ref, Child], *, of_canary: bool = False
) -> DeploymentState | None:
    """Return the state of the Deployment or LeaderWorkerSet that the resource owns; None without it.

    With ``of_canary``, it is that of the Deployment of its canary.
    """
    name = resource.key.name
    refs = [Ref("Deployment", f"{name}{CANARY_SUFFIX}")] if of_canary else list(workload_refs(name))
    owned = (child for ref in refs if (child := children.get(ref)) is not None)
    return next((c.deployment for c in owned if c.owner is not None and c.owner.uid == resource.uid), None)


def workload_refs(name: str) -> tuple[Ref, Ref]:
    """Return the names of the Deployment and the LeaderWorkerSet of an LLMDeployment, which has one of them."""
    return Ref("Deployment", name), Ref(LEADER_WORKER_SET, f"{name}{GROUP_SUFFIX}")


def trim_resource(body: JSON) -> Resource:
    """Return the fields of an LLMDeployment that the operator keeps."""
    metadata = _map(body, "metadata")
    key = Key(_text(metadata, "namespace"), _text(metadata, "name"))
    kept = {
        "apiVersion": body.get("apiVersion"),
        "kind": body.get("kind", KIND),
        "metadata": {"name": key.name, "namespace": key.namespace},
    }
    if "spec" in body:
        kept["spec"] = body["spec"]
    return Resource(
        key=key,
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        generation=_number(metadata, "generation"),
        deleting="deletionTimestamp" in metadata,
        body=kept,
        status=dict(_map(body, "status")),
        created=_text(metadata, "creationTimestamp"),
        refresh_model=_text(_map(metadata, "annotations"), ANNOTATION_REFRESH_MODEL)[:_MAX_ANNOTATION],
        rollout_now=_text(_map(metadata, "annotations"), ANNOTATION_ROLLOUT_NOW)[:_MAX_ANNOTATION],
    )


def trim_adapter(body: JSON) -> Resource:
    """Return the fields of an LLMAdapter that the operator keeps; the items of a list have no kind."""
    return trim_resource({"apiVersion": API_VERSION, **body, "kind": ADAPTER_KIND})


def trim_child(body: JSON, *, kind: str) -> Child:
    """Return the fields of a child that the operator keeps."""
    metadata = _map(body, "metadata")
    foreign = foreign_fields(managed_fields(body)) if kind not in _FILLED_IN_BY_KUBERNETES else ()
    return Child(
        ref=Ref(kind, _text(metadata, "name")),
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        owner=_controller(metadata),
        deleting="deletionTimestamp" in metadata,
        fingerprint=fingerprint(body),
        foreign=foreign,
        deployment=_STATES[kind](body, foreign) if kind in _STATES else None,
        owner_uids=frozenset(_text(owner, "uid") for owner in _maps(metadata, "ownerReferences")),
        data=_map(body, "data") if kind == "ControllerRevision" else None,
    )


def trim_pod(body: JSON) -> Pod:
    """Return the fields of a pod that the operator keeps."""
    metadata, status = _map(body, "metadata"), _map(body, "status")
    labels = _map(metadata, "labels")
    conditions = {_text(c, "type"): c for c in _maps(status, "conditions")}
    scheduled = conditions.get("PodScheduled", {})
    return Pod(
        name=_text(metadata, "name"),
        uid=_text(metadata, "uid"),
        version=_text(metadata, "resourceVersion"),
        ip=_text(status, "podIP"),
        phase=_text(status, "phase"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        deleting="deletionTimestamp" in metadata,
        revision=_text(labels, LABEL_GROUP_REVISION) or _text(labels, "pod-template-hash"),
        created=_text(metadata, "creationTimestamp"),
        unschedulable=_text(scheduled, "message") if scheduled.get("reason") == "Unschedulable" else "",
        containers=(
            *(_container(c, init=True) for c in _maps(status, "initContainerStatuses")),
            *(_container(c, init=False) for c in _maps(status, "containerStatuses")),
        ),
        deletion_cost=_text(_map(metadata, "annotations"), "controller.kubernetes.io/pod-deletion-cost"),
        failed=": ".join(text for text in (_text(status, "reason"), _text(status, "message")) if text),
        model_version=_model_version(status),
        is_canary=labels.get(LABEL_COMPONENT) == CANARY_COMPONENT,
        is_worker=labels.get(LABEL_COMPONENT) == WORKER_COMPONENT,
        group=_text(labels, LABEL_GROUP_INDEX),
        ready_changed=_text(conditions.get("Ready", {}), "lastTransitionTime"),
    )


def _controller(metadata: JSON) -> Owner | None:
    for owner in _maps(metadata, "ownerReferences"):
        if owner.get("controller"):
            return Owner(kind=_text(owner, "kind"), name=_text(owner, "name"), uid=_text(owner, "uid"))
    return None


def _deployment(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    metadata, spec, status = _map(body, "metadata"), _map(body, "spec"), _map(body, "status")
    conditions = {_text(c, "type"): _condition(c) for c in _maps(status, "conditions")}
    return DeploymentState(
        replicas_asked=_number(spec, "replicas"),
        generation=_number(metadata, "generation"),
        observed_generation=_number(status, "observedGeneration"),
        replicas=_number(status, "replicas"),
        updated=_number(status, "updatedReplicas"),
        ready=_number(status, "readyReplicas"),
        available=_number(status, "availableReplicas"),
        revision=_text(_map(metadata, "annotations"), "deployment.kubernetes.io/revision"),
        progressing=conditions.get("Progressing"),
        failure=conditions.get("ReplicaFailure"),
        template_digest=_text(_map(metadata, "annotations"), ANNOTATION_TEMPLATE),
        is_held=spec.get("paused") is True and not any(field.path == _PAUSED for field in foreign),
    )


def _leader_worker_set(body: JSON, foreign: Sequence[ForeignField]) -> DeploymentState:
    metadata, spec, status = _map(body, "metadata"), _map(body, "spec"), _map(body, "status")
    annotations = _map(metadata, "annotations")
    rules = _map(_map(spec, "rolloutStrategy"), "rollingUpdateConfiguration")
    digest, observed = _text(annotations, ANNOTATION_TEMPLATE), _number(status, "observedGeneration")
    deadline = _text(annotations, ANNOTATION_PROGRESS_DEADLINE)
    is_held = rules.get("partition") == HELD_PARTITION and not any(field.path == _PARTITION for field in foreign)
    return DeploymentState(
        replicas_asked=_number(spec, "replicas"),
        generation=_number(metadata, "generation"),
        observed_generation=observed,
        replicas=_number(status, "replicas"),
        updated=_number(status, "updatedReplicas"),
        ready=_number(status, "readyReplicas"),
        available=_number(status, "readyReplicas"),
        # Its controller numbers no revisions, so the template stands for them as soon as it has been observed.
        revision=digest[:_REVISION_LENGTH] if observed else "",
        progressing=None,
        failure=None,
        template_digest=digest,
        is_held=is_held,
        nodes=_number(_map(spec, "leaderWorkerTemplate"), "size"),
        changed=own_entry_time(body),
        deadline_seconds=int(deadline) if deadline.isdecimal() and len(deadline) < 10 else 0,
    )


_REVISION_LENGTH = 10
_STATES = {"Deployment": _deployment, LEADER_WORKER_SET: _leader_worker_set}


def _condition(body: JSON) -> Condition:
    return Condition(is_true=body.get("status") == "True", reason=_text(body, "reason"), message=_text(body, "message"))


def _model_version(status: JSON) -> str:
    """Return the version that the download of a pod reported when it succeeded, or ""."""
    for container in _maps(status, "initContainerStatuses"):
        ended = _map(_map(container, "state"), "terminated")
        message = _text(ended, "message")
        if message.startswith(FETCHED_VERSION) and not ended.get("exitCode"):
            return message.removeprefix(FETCHED_VERSION).strip()[:_MAX_VERSION]
    return ""


def _container(status: JSON, *, init: bool) -> ContainerState:
    waiting = _map(_map(status, "state"), "waiting")
    ended = _map(_map(status, "state"), "terminated") or _map(_map(status, "lastState"), "terminated")
    return ContainerState(
        name=_text(status, "name"),
        init=init,
        ready=status.get("ready") is True,
        restarts=_number(status, "restartCount"),
        waiting_reason=_text(waiting, "reason"),
        waiting_message=_text(waiting, "message"),
        ended_reason=_text(ended, "reason"),
        ended_message=_text(ended, "message"),
        ended_code=_number(ended, "exitCode"),
        running="running" in _map(status, "state"),
    )


def _map(body: JSON, key: str) -> JSON:
    value = body.get(key)
    return value if isinstance(value, Mapping) else {}


def _maps(body: JSON, key: str) -> list[JSON]:
    value = body.get(key)
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, Sequence) else []


def _text(body: JSON, key: str) -> str:
    value = body.get(key)
    return value if isinstance(value, str) else ""


def _number(body: JSON, key: str) -> int:
    value = body.get(key)
    return value if isinstance(value, int) else 0
