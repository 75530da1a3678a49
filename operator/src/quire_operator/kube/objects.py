"""The observed objects, reduced to a few fields each, so that thousands fit in memory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quire_operator.api.fields import Problem
from quire_operator.api.names import CANARY_SUFFIX, GROUP_SUFFIX
from quire_operator.kube.ownership import ForeignField

JSON = Mapping[str, object]
LEADER_WORKER_SET = "LeaderWorkerSet"
HELD_PARTITION = 2**31 - 1
"""The partition of a LeaderWorkerSet whose groups keep their template: updates begin at the group with this index."""


@dataclass(frozen=True, slots=True)
class Key:
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
    removed: tuple[Problem, ...] = ()
    """The fields of earlier versions in its spec, which ``body`` does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
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
    observed_digest: str | None = None
    """The digest of the newest template that its controller rolls out; None if this process has not seen it yet.

    The status does not show it, so ``after`` adds it.
    """

    @property
    def is_rolling(self) -> bool:
        """True if pods of an older template remain, or the controller has not observed the newest one yet.

        A number of replicas that it has not observed yet is no rollout, and neither is a new object without pods.
        """
        is_observed = self.observed_generation >= self.generation or self.observed_digest == self.template_digest
        return not self.is_held and (self.updated < self.replicas or not (is_observed or self.is_new))

    @property
    def is_new(self) -> bool:
        """True until its controller has observed it for the first time."""
        return self.observed_generation == 0

    def after(self, before: "DeploymentState | None") -> "DeploymentState":
        """Return this state with the template that its controller rolls out, which an earlier state may show."""
        if self.observed_generation >= self.generation and not self.is_held:
            return replace(self, observed_digest=self.template_digest)
        return replace(self, observed_digest=None if before is None else before.observed_digest)


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

    def after(self, before: "Child | None") -> "Child":
        """Return this child with what only its earlier version shows, if that is one of the same object."""
        if self.deployment is None:
            return self
        known = before.deployment if before is not None and before.uid == self.uid else None
        return replace(self, deployment=self.deployment.after(known))


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
