"""The decision which rollouts may start: a limited number of LLMDeployments replace replicas at once. Pure.

A new operator can render another pod template for every LLMDeployment at the same moment. Each such Deployment gets the
new template with ``spec.paused``, which keeps its replicas and still allows scaling, until a slot is free. A change of
a spec starts at once; it takes a slot but does not wait for one.
"""

from collections.abc import Collection

from quire_operator.domain.cluster_state.observed import DeploymentState, Key, Resource
from quire_operator.domain.status.capacity_check import is_refused
from quire_operator.domain.status.conditions import Queued
from quire_operator.domain.status.rollout import is_overdue

_SHOWN = 5


def begins_rollout(live: DeploymentState, *, template_digest: str) -> bool:
    """Return whether applying a template with this digest starts a rollout, unless one is already in progress."""
    # A new Deployment has no pods to replace, and a pause would keep its controller from creating them.
    if live.is_new or (live.replicas_asked == 0 and live.replicas == 0):
        return False
    return live.is_held or (live.template_digest != template_digest and not live.is_rolling)


def is_own_idea(resource: Resource) -> bool:
    """Return whether this generation of the spec was applied before, so that the operator causes the rollout."""
    return resource.status.get("observedGeneration") == resource.generation and not is_refused(resource)


def takes_slot(state: DeploymentState) -> bool:
    """Return whether a Deployment replaces replicas; one that has exceeded its deadline has stopped."""
    return state.is_rolling and state.replicas_asked > 0 and not is_overdue(state)


def queued(rolling: Collection[Key], limit: int) -> Queued | None:
    """Return why another rollout must wait for these, or None if it may start."""
    if not limit or len(rolling) < limit:
        return None
    names = sorted(map(str, rolling))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return Queued(
        reason="RolloutQueued",
        message=(
            f"the operator has a newer pod template; its rollout waits for those of {', '.join(names[:_SHOWN])}{more} "
            f"(at most {limit} at once)"
        ),
    )


PAUSED = Queued(reason="Paused", message="spec.paused is true: replicas are scaled and not replaced")
