"""The actions that change the observed into the desired state: ``plan(desired, observed, applied) -> Plan``, pure.

The fingerprint of our managed fields shows whether an object is as we left it. Bodies cannot be compared, because the
API server defaults, rounds and reorders fields. Also the number of replicas of a pass, the pods to remove first, and
what happens to the NetworkPolicy of a deleted LLMDeployment.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from quire_operator.api import AutoscalingMode, Spec
from quire_operator.api.engine import MAX_SIZE
from quire_operator.api.names import CANARY_SUFFIX, KIND
from quire_operator.autoscaling.history import ScalingRecord
from quire_operator.autoscaling.schedules import recorded_bounds
from quire_operator.canary.manifests import canary_refs
from quire_operator.deployment.conditions import BlockingCondition
from quire_operator.deployment.desired import (
    CHILDREN,
    MONITORING_KINDS,
    NONBLOCKING_KINDS,
    POLICY,
    UNOWNED_KINDS,
    WORKLOAD_KINDS,
    departed_policy,
)
from quire_operator.deployment.manifests import ClusterFeatures, Manifest, Manifests
from quire_operator.deployment.status import Event
from quire_operator.kube.objects import Child, DeploymentState, Key, Pod, Ref, workload_refs
from quire_operator.kube.ownership import ForeignField, breaks_contract, exists_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A number of replicas. ``persist`` is the number that status must record first; None if it already does."""

    replicas: int
    persist: int | None


def target(
    spec: Spec,
    *,
    decided: int | None,
    record: ScalingRecord | None,
    deployment: DeploymentState | None,
    kept: int | None = None,
    now: float,
) -> Target:
    """Return the target at ``now``, which decides the schedule that is in force.

    ``decided`` is the last decision of this process; None after a restart. ``kept`` is the decision that stays in force
    after the autoscaler was removed from the spec.
    """
    autoscaling = spec.autoscaling
    if autoscaling is None:
        return Target(replicas=spec.replicas if kept is None else kept, persist=None)
    running = spec.initial_replicas if deployment is None else deployment.replicas_asked
    if autoscaling.mode is AutoscalingMode.RECOMMEND:
        return Target(replicas=running, persist=None)
    persisted = None if record is None else record.desired_replicas
    wanted = next(number for number in (decided, persisted, running) if number is not None)
    bounds = recorded_bounds(autoscaling, record, now)
    replicas = bounds.clamp(wanted)
    if deployment is not None and deployment.is_rolling and replicas < running <= bounds.max_replicas:
        # While old replicas are replaced, the new ones must be able to take over the load of both.
        replicas = running
    # A number outside the bounds must not come back when the autoscaler is removed before its next decision.
    is_recorded = persisted is not None and bounds.clamp(persisted) == persisted
    return Target(replicas=replicas, persist=None if is_recorded else replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """An object as it was after our last apply.

    It is kept in memory only: after a restart every child is applied once.
    """

    uid: str
    digest: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Apply a missing object without force, because another client may create it first."""

    manifest: Manifest
    reason: str = "it does not exist"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Apply over an object of ours with force, because its fields are ours to set."""

    manifest: Manifest
    reason: str
    drift: tuple[ForeignField, ...] = ()
    """Fields of ours that other clients had set."""
    is_repair: bool = False
    """True if the object is not as this process left it, although nothing in the desired state changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoveFields:
    """Remove fields that other clients added and that break the contract of a replica."""

    ref: Ref
    version: str
    fields: tuple[ForeignField, ...]

    @property
    def reason(self) -> str:
        return f"other clients added {', '.join(map(str, self.fields))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Delete an object of ours that is no longer desired."""

    ref: Ref
    uid: str
    reason: str


Action = Create | Update | RemoveFields | Delete
_WITHHELD_KINDS = WORKLOAD_KINDS | {"PersistentVolumeClaim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignObject:
    """An object that has the name of a child but is not ours, or no longer; it is never changed."""

    ref: Ref
    message: str
    passing: bool
    """True if it is being deleted or will be, so that the name becomes free without a user's action."""
    is_ours: bool = False
    """True if it is our child and is being deleted. The workload still changes, so that its pods can release it."""

    @property
    def withholds(self) -> bool:
        """True if pods would use this object as if it were ours, for example its ServiceAccount."""
        return not self.is_ours and self.ref.kind not in MONITORING_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The actions and findings of a pass; empty if the cluster is as desired."""

    actions: tuple[Action, ...]
    conflicts: tuple[ForeignObject, ...]
    additions: tuple[ForeignField, ...]
    """Fields that other clients added to the children and that may stay."""


def plan(
    desired: Manifests, observed: Mapping[Ref, Child], applied: Mapping[Ref, Applied], *, name: str, uid: str
) -> Plan:
    children = (observed[manifest.ref] for manifest in desired if manifest.ref in observed)
    found = (_conflict(child, name=name, uid=uid) for child in children)
    conflicts = tuple(conflict for conflict in found if conflict is not None)
    withheld = _withheld(desired, conflicts)
    unchanged = withheld | {conflict.ref for conflict in conflicts}
    actions: list[Action] = []
    for manifest in desired:
        if manifest.ref not in unchanged:
            actions += _actions(manifest, observed.get(manifest.ref), applied.get(manifest.ref))
    for delete in _leftovers(desired, observed, uid=uid):
        # While the workload waits, the replicas of its previous form serve.
        if desired.workload.ref not in withheld or delete.ref in canary_refs(name):
            actions.append(delete)
    return Plan(actions=tuple(actions), conflicts=conflicts, additions=tuple(_additions(desired, observed, uid=uid)))


def _withheld(desired: Manifests, conflicts: Sequence[ForeignObject]) -> frozenset[Ref]:
    """Return the workloads and claims that are not changed while foreign objects have names of children.

    The pods of the stable revision need the children up to their workload. The pods of a canary need all children.
    """
    taken = {conflict.ref for conflict in conflicts if conflict.withholds}
    refs = [manifest.ref for manifest in desired]
    stable = refs.index(desired.workload.ref) + 1
    waiting = refs if taken.intersection(refs[:stable]) else refs[stable:] if taken else []
    return frozenset(ref for ref in waiting if ref.kind in _WITHHELD_KINDS)


def _additions(desired: Manifests, observed: Mapping[Ref, Child], *, uid: str) -> Iterator[ForeignField]:
    """Yield the additions that may stay, each with its object; those of the Deployment first."""
    for manifest in sorted(desired, key=lambda manifest: manifest is not desired.workload):
        child = observed.get(manifest.ref)
        if child is not None and child.owner is not None and child.owner.uid == uid:
            for field in _added(child, manifest, breaking=False):
                yield replace(field, child=str(manifest.ref))


def is_adoptable(child: Child) -> bool:
    """Return whether an object without a controller is one that quire leaves without one and takes up again."""
    return child.owner is None and bool(child.fingerprint) and child.ref.kind in UNOWNED_KINDS


def _conflict(child: Child, *, name: str, uid: str) -> ForeignObject | None:
    if (child.owner is not None and child.owner.uid == uid) or is_adoptable(child):
        if not child.deleting:
            return None
        return ForeignObject(
            ref=child.ref,
            message=f"{child.ref} is being deleted and will be recreated afterwards",
            passing=True,
            is_ours=True,
        )
    if child.owner is not None and (child.owner.kind, child.owner.name) == (KIND, name):
        message = f"{child.ref} belongs to an earlier {KIND} of this name and is deleted with it"
        return ForeignObject(ref=child.ref, message=message, passing=True)
    if child.owner is not None:
        whose = f"belongs to {child.owner}"
    elif child.fingerprint:
        whose = "was orphaned when its LLMDeployment was deleted (--cascade=orphan)"
    else:
        whose = "was not created by quire"
    message = f"{child.ref} already exists and {whose}; delete or rename it, or choose another name"
    return ForeignObject(ref=child.ref, message=message, passing=False)


def _actions(manifest: Manifest, child: Child | None, applied: Applied | None) -> Iterator[Action]:
    if child is None:
        yield Create(manifest=manifest)
        return
    if (update := _update(manifest, child, applied)) is not None:
        yield update
    breaking = tuple(_added(child, manifest, breaking=True))
    if breaking:
        yield RemoveFields(ref=manifest.ref, version=child.version, fields=breaking)


def _update(manifest: Manifest, child: Child, applied: Applied | None) -> Update | None:
    drift = tuple(field for field in child.foreign if exists_in(manifest.body, field.path))
    is_repair = False
    if applied is None or applied.uid != child.uid:
        reason = "this process has not applied it yet"
    elif applied.digest != manifest.digest:
        reason = "the desired state changed"
    elif applied.fingerprint != child.fingerprint:
        is_repair = True
        reason = (
            f"other clients changed it: {', '.join(map(str, drift))}"
            if drift
            else "other clients changed or removed its fields"
        )
    else:
        return None
    return Update(manifest=manifest, reason=reason, drift=drift, is_repair=is_repair)


def _added(child: Child, manifest: Manifest, *, breaking: bool) -> Iterator[ForeignField]:
    for field in child.foreign:
        if not exists_in(manifest.body, field.path) and breaks_contract(field.path) is breaking:
            yield field


def _leftovers(desired: Manifests, observed: Mapping[Ref, Child], *, uid: str) -> Iterator[Delete]:
    wanted = {manifest.ref for manifest in desired}
    for ref, child in observed.items():
        is_ours = child.owner is not None and child.owner.uid == uid
        if ref not in wanted and not child.deleting and (is_ours or (ref.kind == POLICY.kind and is_adoptable(child))):
            yield Delete(ref=ref, uid=child.uid, reason="the spec no longer requires it")


def name_conflicts(conflicts: Sequence[ForeignObject]) -> tuple[BlockingCondition | None, BlockingCondition | None]:
    """Return the conflicts of children that replicas need, and those of the other children."""

    def blocking(found: Sequence[ForeignObject]) -> BlockingCondition | None:
        messages = "; ".join(conflict.message for conflict in found)
        is_passing = all(conflict.passing for conflict in found)
        return BlockingCondition(reason="NameConflict", message=messages, is_passing=is_passing) if found else None

    def needed(conflict: ForeignObject) -> bool:
        return conflict.withholds or conflict.ref.kind not in NONBLOCKING_KINDS

    return (
        blocking([conflict for conflict in conflicts if needed(conflict)]),
        blocking([conflict for conflict in conflicts if not needed(conflict)]),
    )


def refused(action: Action, message: str) -> BlockingCondition:
    match action:
        case Create(manifest=manifest) | Update(manifest=manifest):
            what = f"the {manifest.ref} of this spec"
            if isinstance(action, Update) and manifest.ref.kind == "PersistentVolumeClaim":
                message += (
                    "; revert spec.model.cache, or delete the claim with the downloaded model: kubectl delete pvc "
                    f"{manifest.ref.name}. Kubernetes does so when no pod uses it, and the operator creates it again"
                )
            return BlockingCondition(reason="InvalidSpec", message=f"the API server rejected {what}: {message}")
        case RemoveFields(ref=ref, fields=fields):
            what = f"the removal of breaking fields from the {ref} ({listed(fields)})"
            return BlockingCondition(reason="RemovalRefused", message=f"the API server rejected {what}: {message}")
        case Delete(ref=ref, reason=reason):
            what = f"the deletion of the {ref} ({reason})"
            return BlockingCondition(reason="DeletionRefused", message=f"the API server rejected {what}: {message}")
        case _:
            assert_never(action)


def repaired(ref: Ref, drift: Sequence[ForeignField]) -> Event:
    """Return the Event for fields of ours that were set back."""
    return Event(
        warning=True, reason="DriftRepaired", message=f"reverted changes by other clients to {ref}: {listed(drift)}"
    )


def removed(ref: Ref, fields: Sequence[ForeignField]) -> Event:
    return Event(
        warning=True,
        reason="FieldsRemoved",
        message=f"removed breaking fields of other clients from {ref}: {listed(fields)}",
    )


def listed(fields: Sequence[ForeignField]) -> str:
    """Return the fields with their managers, as text."""
    return ", ".join(map(str, fields))


def departure(
    key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod], features: ClusterFeatures
) -> Update | Delete | None:
    """Return what has to be done with the policy that an LLMDeployment left behind; None if nothing has."""
    policy = children.get(POLICY.ref(key.name))
    if policy is None or policy.deleting or not is_adoptable(policy):
        return None
    owners = _owners(key, children, pods)
    if not owners or features.network_peers is None:
        return Delete(ref=policy.ref, uid=policy.uid, reason="its LLMDeployment and all pods are gone")
    if {str(owner["uid"]) for owner in owners} <= policy.owner_uids:
        return None
    nodes = _nodes(key, children, pods)
    manifest = departed_policy(key.name, key.namespace, features, owners=owners, nodes=nodes)
    return Update(manifest=manifest, reason="its LLMDeployment is gone and pods are left")


def _owners(key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod]) -> list[dict[str, object]]:
    refs = (*workload_refs(key.name), Ref("Deployment", f"{key.name}{CANARY_SUFFIX}"))
    workloads = [child for ref in refs if (child := children.get(ref)) is not None]
    versions = {child.kind: child.api_version for child in CHILDREN}
    left = [_owner(versions[child.ref.kind], child.ref.kind, child.ref.name, child.uid) for child in workloads]
    return left + [_owner("v1", "Pod", pod.name, pod.uid) for pod in pods]


def _nodes(key: Key, children: Mapping[Ref, Child], pods: Sequence[Pod]) -> int:
    """Return the number of pods of a replica; 64, the largest possible, if only pods of groups are left to show it."""
    groups = children.get(workload_refs(key.name)[1])
    if groups is not None and groups.deployment is not None:
        return groups.deployment.nodes
    return MAX_SIZE if any(pod.group for pod in pods) else 1


def _owner(api_version: str, kind: str, name: str, uid: str) -> dict[str, object]:
    return {"apiVersion": api_version, "kind": kind, "name": name, "uid": uid}


_LOWEST = -1000


def deletion_costs(pods: Sequence[Pod], victims: Sequence[str]) -> dict[str, str | None]:
    """Return the pods whose cost must change, with the new cost; None removes it. Earlier victims get lower costs."""
    wanted = {name: str(_LOWEST + place) for place, name in enumerate(victims)}
    costs: dict[str, str | None] = {}
    for pod in pods:
        cost = wanted.get(pod.name)
        if not pod.deleting and (cost or "") != pod.deletion_cost:
            costs[pod.name] = cost
    return costs
