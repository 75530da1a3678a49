"""The actions that change the observed into the desired state: ``plan(desired, observed, applied) -> Plan``, pure.

It follows ``desired``, and ``reconcile`` applies the actions in order. The fingerprint of our managed fields shows
whether an object is as we left it. Bodies cannot be compared, because the API server defaults, rounds and reorders
fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire_operator.domain.cluster_state.observed import Child, Ref
from quire_operator.domain.cluster_state.ownership import ForeignField, breaks_contract, exists_in, removal_patch
from quire_operator.domain.manifests.canary import canary_refs
from quire_operator.domain.manifests.child_kinds import MONITORING_KINDS, POLICY, UNOWNED_KINDS, WORKLOAD_KINDS
from quire_operator.domain.manifests.objects import Manifest, Manifests
from quire_operator.domain.resource.names import KIND


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
    patch: Mapping[str, object]
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
    desired: Manifests,
    observed: Mapping[Ref, Child],
    applied: Mapping[Ref, Applied],
    *,
    name: str,
    uid: str,
) -> Plan:
    """Return the plan for the LLMDeployment with this name and uid."""
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
        patch = removal_patch([field.path for field in breaking])
        yield RemoveFields(ref=manifest.ref, version=child.version, patch=patch, fields=breaking)


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
