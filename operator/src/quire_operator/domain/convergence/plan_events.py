"""Blocking conditions and Events for plans that were applied or could not be applied. Pure; ``reconcile`` uses them."""

from collections.abc import Sequence
from typing import assert_never

from quire_operator.domain.cluster_state.observed import Ref
from quire_operator.domain.cluster_state.ownership import ForeignField
from quire_operator.domain.convergence.plan import Action, Create, Delete, ForeignObject, RemoveFields, Update
from quire_operator.domain.manifests.child_kinds import NONBLOCKING_KINDS
from quire_operator.domain.status.conditions import BlockingCondition
from quire_operator.domain.status.status import Event


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
    """Return the condition for an action that the API server rejected."""
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
    """Return the Event for fields of other clients that were removed."""
    return Event(
        warning=True,
        reason="FieldsRemoved",
        message=f"removed breaking fields of other clients from {ref}: {listed(fields)}",
    )


def listed(fields: Sequence[ForeignField]) -> str:
    """Return the fields with their managers, as text."""
    return ", ".join(map(str, fields))
